"""What tests share: the fp64 oracle, awkward inputs, contract checks, the cases of each op."""
