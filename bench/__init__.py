"""The benchmark: every speed, memory and MFU claim of this project is printed from here.

    fastweights bench                        the headline cases on a GPU, small ones on a CPU
    fastweights bench --suite all --json     every case, one record an op in bench/results/<gpu>/
    fastweights bench newton_schulz          one op
    fastweights bench --compare A.json B.json
    fastweights bench --readme               rewrite the README's table from the records

| file             | duty                                                             |
|------------------|------------------------------------------------------------------|
| `families.py`    | the list of op families, and the choice among their cases        |
| `family.py`      | what a family answers; `cases.py` what each of its cases has     |
| `attention/`,    | families: their cases, our calls, peers, and what the gate takes |
| `newton_schulz/` |                                                                  |
| `omega/`,        |                                                                  |
| `omega_step/`,   |                                                                  |
| `delta_rewrite/` |                                                                  |
| `gate.py`        | correctness before time                                          |
| `timing.py`      | CUDA graphs, interleaved, cold L2; host time apart               |
| `memory.py`      | peak bytes of forward + backward                                 |
| `ceilings.py`    | copy and matmul measured in the same run; `peaks.py` data sheets |
| `runner.py`      | cases to rows                                                    |
| `record.py`      | rows as JSON, and comparing two records                          |
| `table.py`       | rows as text; `plot.py` as a picture; `readme.py` in the README  |
| `test_*.py`      | the cases under pytest-benchmark, by `speed.py`                  |

Ratios are taken between contenders of one process, timed in turn, never between runs. TFLOP/s
count useful work by the conventions of `fastweights.ops.flops`.
"""
