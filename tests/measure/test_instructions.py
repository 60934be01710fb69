"""What counts as an instruction of a kernel, and of its loop."""

from __future__ import annotations

from types import SimpleNamespace

from tests.measure.instructions import report

TEXT = """
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0030*/                   IADD3 R0, R0, 0x1, RZ ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0060*/                   EXIT ;
.L_x_1:
        /*0070*/                   BRA `(.L_x_1);
        /*0080*/                   NOP;
"""


def test_counts() -> None:
    """Of 8 rows both products have other weights; of 16 they share them."""
    for rows, each in ((8, "0.250"), (16, "0.500")):
        item = SimpleNamespace(name="one", constexprs={"BM": rows})
        found = report(item, TEXT)
        assert found == f"one: 8 instructions, 1 barriers; loop 4, {each} a weight"


def test_kernels_without_products() -> None:
    item = SimpleNamespace(name="one", constexprs={})
    assert report(item, TEXT.replace("HMMA", "FFMA")) == "one: 8 instructions, 1 barriers"
