"""Models as wiring over the public ops: blocks, one file a model, a cost model, generation.

No kernel and no formula that an op could own lives here; this version ships no model yet.
"""
