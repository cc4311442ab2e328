"""Faults read off machine code; the listings are cut down from what nvdisasm prints."""

from fastweights.autotune import sass


def test_one_serial_stretch_is_enough_and_short_products_tell_nothing():
    one = "WARPGROUP.ARRIVE ; HGMMA.64x64x16.F32 R4 ; WARPGROUP.DEPBAR.LE ;\n"
    healthy = "WARPGROUP.ARRIVE ;\n" + 8 * "HGMMA.64x64x16.F32 R4 ;\n" + "WARPGROUP.DEPBAR.LE ;\n"
    assert not sass.serial_wgmma(healthy + ".L_x_1:\n" + healthy)
    assert sass.serial_wgmma(healthy + ".L_x_1:\n" + 4 * one + ".L_x_2:\n" + healthy)
    assert not sass.serial_wgmma(healthy + ".L_x_1:\n" + 2 * one)
    some_run_on = one.replace("LE ;", "LE gsb0, 0x3 ;")
    assert not sass.serial_wgmma(healthy + ".L_x_1:\n" + 4 * some_run_on)
    all_waited_for = one.replace("LE ;", "LE gsb0, 0x0 ;")
    assert sass.serial_wgmma(healthy + ".L_x_1:\n" + 4 * all_waited_for)
    few = "WARPGROUP.ARRIVE ;\n" + 4 * "HGMMA.64x64x16.F32 R4 ;\n" + "WARPGROUP.DEPBAR.LE ;\n"
    assert not sass.serial_wgmma(3 * "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n" + few)


def listing(*lines: str) -> str:
    """Instructions with their addresses; labels as they are."""
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * i:04x}*/    {line} ;"
        for i, line in enumerate(lines)
    )


SET_A = ("UMOV UR4, 0x80", "UIADD3.X UR5, UP0, URZ, 0x40000040, URZ")
SET_B = ("R2UR UR6, R20", "UMOV UR7, 0x40000040")
PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT"
LOOP = (PRODUCT, "@P1 BRA `(.L_x_1)")


def test_a_descriptor_set_before_the_branch_serves_both_loops():
    code = listing(
        *SET_A, *SET_B, "@!P0 BRA `(.L_x_2)", ".L_x_1:", *LOOP, ".L_x_2:", PRODUCT, "EXIT"
    )
    assert sass.unset_descriptors(code) == []


def test_a_descriptor_set_behind_the_branch_is_unset_in_the_second_loop():
    code = listing(
        *SET_B, "@!P0 BRA `(.L_x_2)", *SET_A, ".L_x_1:", *LOOP, ".L_x_2:", PRODUCT, "EXIT"
    )
    assert sass.unset_descriptors(code) == [PRODUCT]


def test_all_four_registers_count_and_the_last_two_where_an_operand_is_in_registers():
    assert len(sass.unset_descriptors(listing(*SET_A, PRODUCT, "EXIT"))) == 1
    from_registers = "HGMMA.64x64x16.F32.BF16 R152, R24, gdesc[UR4].tnspB, R152"
    assert sass.unset_descriptors(listing(*SET_B, from_registers, "EXIT")) == []
    assert len(sass.unset_descriptors(listing(*SET_A, from_registers, "EXIT"))) == 1
    assert len(sass.unset_descriptors(listing("UMOV UR6, 0x20", from_registers, "EXIT"))) == 1


def test_wide_instructions_and_those_with_a_predicate_set_registers():
    wide = listing("ULDC.64 UR4, c[0x0][0x210]", "UIADD3.64 UR6, UR4, 0x2, URZ", PRODUCT, "EXIT")
    assert sass.unset_descriptors(wide) == []
    logic = listing(*SET_B, "ULOP3.LUT UP0, UR4, UR6, 0x1, URZ, 0xc0, !UPT", SET_A[1], PRODUCT)
    assert sass.unset_descriptors(logic) == []
    compare = listing("UISETP.GE.AND UP0, UPT, UR4, UR5, UPT", SET_A[1], *SET_B, PRODUCT)
    assert sass.unset_descriptors(compare) == [PRODUCT]


def test_what_is_formed_from_an_unset_register_is_unset():
    formed = ("UIADD3 UR6, UP0, UR9, 0x20, URZ", "UIADD3.X UR7, UR9, 0x40000040, URZ, UP0, !UPT")
    assert sass.unset_descriptors(listing(*SET_A, *formed, PRODUCT, "EXIT")) == [PRODUCT]
    early = listing(*SET_A, *formed, "UMOV UR9, URZ", PRODUCT, "EXIT")
    assert sass.unset_descriptors(early) == [PRODUCT]
    assert sass.unset_descriptors(listing(*SET_A, "UMOV UR9, URZ", *formed, PRODUCT)) == []
    halves = ("UMOV UR8, URZ", "UIADD3.64 UR6, UR8, 0x20, URZ")
    assert sass.unset_descriptors(listing(*SET_A, *halves, PRODUCT, "EXIT")) == [PRODUCT]


def test_partitions_behind_an_indirect_branch_are_read():
    table = 'BRX R2 -0x220 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)'
    code = listing(*SET_A, table, ".L_x_1:", *SET_B, PRODUCT, "EXIT", ".L_x_2:", PRODUCT, "EXIT")
    assert sass.unset_descriptors(code) == [PRODUCT]
    unreached = listing(*SET_A, *SET_B, "EXIT", ".L_x_9:", "UMOV UR9, URZ", PRODUCT, "EXIT")
    assert sass.unset_descriptors(unreached) == []
