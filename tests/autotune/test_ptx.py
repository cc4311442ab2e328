"""Faults read off PTX; the listings are cut down from what Triton makes."""

from fastweights.autotune import ptx

BASE = "mov.b32 \t%r9, global_smem;\n"
BARRIER = (
    "add.s32 \t%r1, %r9, 1024;\n@%p1 mbarrier.init.shared::cta.b64 [%r1], 1;\n"
    "mbarrier.try_wait.parity.shared.b64 complete, [%r1], %r3;\n"
)


def test_data_in_the_words_of_a_barrier_is_found_by_either_form_of_address():
    named = "ld.shared.b32 \t%r7, [global_smem+1028];\n"
    assert ptx.shared_barriers(BASE + BARRIER + named) == [1028]
    register = "add.s32 \t%r2, %r9, 1024;\n@%p4 st.shared.b32 [ %r2 + 0 ], %r5;\n"
    assert ptx.shared_barriers(BASE + BARRIER + register) == [1024]


def test_words_of_a_barrier_that_is_invalidated_serve_again():
    end = "@%p1 mbarrier.inval.shared::cta.b64 [%r1];\n"
    data = "ld.shared.b32 \t%r7, [global_smem+1024];\n"
    assert ptx.shared_barriers(BASE + BARRIER + end + data) == []


def test_a_wide_access_reaches_into_the_next_words():
    wide = "st.shared.v4.b32 \t[global_smem+{}], {{0, 0, 0, 0}};\n"
    assert ptx.shared_barriers(BASE + BARRIER + wide.format(1016)) == [1016]
    assert ptx.shared_barriers(BASE + BARRIER + wide.format(1008)) == []
    assert ptx.shared_barriers(BASE + BARRIER + wide.format(1032)) == []


def test_a_barrier_at_the_start_of_shared_memory():
    first = "@%p1 mbarrier.init.shared::cta.b64 [%r9], 1;\n"
    data = "st.shared.b8 \t[global_smem], %r1;\n"
    assert ptx.shared_barriers(BASE + first + data) == [0]


def test_kernels_without_shared_memory_and_addresses_that_are_no_constants():
    assert ptx.shared_barriers("ld.global.b32 \t%r7, [%rd1];\n") == []
    unknown = "add.s32 \t%r2, %r9, %r4;\nld.shared.b32 \t%r7, [%r2+1024];\n"
    assert ptx.shared_barriers(BASE + BARRIER + unknown) == []


def test_matrix_instruction():
    assert ptx.matrix_instruction("wgmma.mma_async.sync; mma.sync") == "wgmma"
    assert ptx.matrix_instruction("mma.sync.aligned") == "mma"
    assert ptx.matrix_instruction("fma.rn.f32") == "fma"
