"""Serves nothing."""


def supports(shape, arch):
    """Why not."""
    return "the tests have no use for it"
