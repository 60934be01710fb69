"""Registers of two bfloat16 from words of quantized weights, for `linear_q_fragments`.

Words lie as `specc.artifact.fragments` has them: two columns of a row are in the two halves of a
word, so one instruction handles both. A level is never converted: its bits are put below an
exponent that gives them their worth, and what that adds is subtracted, or they are put into the
exponent and mantissa of bfloat16 and multiplied by a power of two. All of it is exact.

- int4: 4 bits and 0x4300 are 128 + u; less 136, or less 128 + z.
- int8, whose levels are stored as two's complement: the lower 7 bits and 0x4300 are 128 + low;
  bit 7 is the last bit of the exponent, so bit 7 and 0x4300 are 128 or 256. The difference is
  u - 128.
- fp8: 7 bits at 10 … 4 are a value times 2^-120.
- mxfp4, nvfp4: 3 bits at 8 … 6 are a value times 2^-126, which is multiplied by its scale times a
  power of two. A scale has at most 4 bits, so a product has at most 6.

Sums and products of pairs are written as fused products, as sm_80 has no others.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# two words → four registers of each
_INT4 = """{
    .reg .b32 t, m, e, one;
    mov.b32 m, 0x000f000f; mov.b32 e, 0x43004300; mov.b32 one, 0x3f803f80;
    lop3.b32 $0, $8, m, e, 0xea;
    shr.u32 t, $8, 4; lop3.b32 $1, t, m, e, 0xea;
    shr.u32 t, $8, 8; lop3.b32 $2, t, m, e, 0xea;
    shr.u32 t, $8, 12; lop3.b32 $3, t, m, e, 0xea;
    lop3.b32 $4, $9, m, e, 0xea;
    shr.u32 t, $9, 4; lop3.b32 $5, t, m, e, 0xea;
    shr.u32 t, $9, 8; lop3.b32 $6, t, m, e, 0xea;
    shr.u32 t, $9, 12; lop3.b32 $7, t, m, e, 0xea;
"""
UNPACK_INT4 = gl.constexpr(
    _INT4
    + """
    .reg .b32 s; mov.b32 s, 0xc308c308;
    fma.rn.bf16x2 $0, $0, one, s; fma.rn.bf16x2 $1, $1, one, s;
    fma.rn.bf16x2 $2, $2, one, s; fma.rn.bf16x2 $3, $3, one, s;
    fma.rn.bf16x2 $4, $4, one, s; fma.rn.bf16x2 $5, $5, one, s;
    fma.rn.bf16x2 $6, $6, one, s; fma.rn.bf16x2 $7, $7, one, s;
}"""
)
# the halves of $10 are for rows 0 … 7 and for rows 8 … 15: written so, they are read where they are
_OF_ROWS = """
    .reg .b32 k, l; .reg .b16 a, b;
    mov.b32 {a, b}, $10; mov.b32 k, {a, a}; mov.b32 l, {b, b};"""
# here they are what is added
UNPACK_INT4_ZEROS = gl.constexpr(
    _INT4
    + _OF_ROWS
    + """
    fma.rn.bf16x2 $0, $0, one, k; fma.rn.bf16x2 $1, $1, one, l;
    fma.rn.bf16x2 $2, $2, one, k; fma.rn.bf16x2 $3, $3, one, l;
    fma.rn.bf16x2 $4, $4, one, k; fma.rn.bf16x2 $5, $5, one, l;
    fma.rn.bf16x2 $6, $6, one, k; fma.rn.bf16x2 $7, $7, one, l;
}"""
)
# codes of a half at 15 8 7 6, 9 2 1 0, 5 14 13 12, with the sign in the other half, and 11 4 3 10
UNPACK_E2M1 = gl.constexpr(
    "{"
    + _OF_ROWS
    + """
    .reg .b32 t, u, m, n, z, low;
    mov.b32 m, 0x81c081c0; mov.b32 z, 0x80008000; mov.b32 n, 0x81808180; mov.b32 low, 0x00400040;
    and.b32 $0, $8, m; fma.rn.bf16x2 $0, $0, k, z;
    shl.b32 t, $8, 6; and.b32 $1, t, m; fma.rn.bf16x2 $1, $1, l, z;
    shf.r.wrap.b32 t, $8, $8, 6; and.b32 $2, t, m; fma.rn.bf16x2 $2, $2, k, z;
    shl.b32 t, $8, 4; and.b32 u, t, n; shr.u32 t, $8, 4; lop3.b32 $3, t, low, u, 0xea;
    fma.rn.bf16x2 $3, $3, l, z;
    and.b32 $4, $9, m; fma.rn.bf16x2 $4, $4, k, z;
    shl.b32 t, $9, 6; and.b32 $5, t, m; fma.rn.bf16x2 $5, $5, l, z;
    shf.r.wrap.b32 t, $9, $9, 6; and.b32 $6, t, m; fma.rn.bf16x2 $6, $6, k, z;
    shl.b32 t, $9, 4; and.b32 u, t, n; shr.u32 t, $9, 4; lop3.b32 $7, t, low, u, 0xea;
    fma.rn.bf16x2 $7, $7, l, z;
}"""
)


@gluon.constexpr_function
def scales_of_span(kind: str, span: int) -> str:
    """Bytes of a tile's scales → both of span 0 or 1 in bfloat16: `specc.artifact.fragments`."""
    select = "0x4341" if span else "0x4240"
    place = "128, 0x37003700" if kind == "mxfp4" else "16, 0x70007000"
    return f"{{ .reg .b32 t; prmt.b32 t, $1, 0, {select}; mad.lo.u32 $0, t, {place}; }}"


# two words → two registers of each
UNPACK_INT8 = gl.constexpr("""{
    .reg .b32 t, u, a, m, n, e, less;
    mov.b32 m, 0x007f007f; mov.b32 n, 0x00800080; mov.b32 e, 0x43004300; mov.b32 less, 0xbf80bf80;
    lop3.b32 a, $4, n, e, 0xea; lop3.b32 t, $4, m, e, 0xea; fma.rn.bf16x2 $0, a, less, t;
    shr.u32 u, $4, 8; lop3.b32 a, u, n, e, 0xea; lop3.b32 t, u, m, e, 0xea;
    fma.rn.bf16x2 $1, a, less, t;
    lop3.b32 a, $5, n, e, 0xea; lop3.b32 t, $5, m, e, 0xea; fma.rn.bf16x2 $2, a, less, t;
    shr.u32 u, $5, 8; lop3.b32 a, u, n, e, 0xea; lop3.b32 t, u, m, e, 0xea;
    fma.rn.bf16x2 $3, a, less, t;
}""")
# a half has one code at 15 and 10 … 4, the other at 11, 14 … 12 and 3 … 0
UNPACK_FP8 = gl.constexpr("""{
    .reg .b32 t, u, m, n, h, k, z;
    mov.b32 m, 0x87f087f0; mov.b32 n, 0x80f080f0; mov.b32 h, 0x07000700;
    mov.b32 k, 0x7b807b80; mov.b32 z, 0x80008000;
    and.b32 $0, $4, m; fma.rn.bf16x2 $0, $0, k, z;
    shl.b32 t, $4, 4; and.b32 u, t, n; shr.u32 t, $4, 4; lop3.b32 $1, t, h, u, 0xea;
    fma.rn.bf16x2 $1, $1, k, z;
    and.b32 $2, $5, m; fma.rn.bf16x2 $2, $2, k, z;
    shl.b32 t, $5, 4; and.b32 u, t, n; shr.u32 t, $5, 4; lop3.b32 $3, t, h, u, 0xea;
    fma.rn.bf16x2 $3, $3, k, z;
}""")

_EIGHT = gl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r")
_EIGHT_ROWS = gl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r")
_FOUR = gl.constexpr("=&r,=&r,=&r,=&r,r,r")
_PAIRS_8 = gl.constexpr((gl.bfloat16,) * 8)
_PAIRS_4 = gl.constexpr((gl.bfloat16,) * 4)


@gluon.jit
def operand_of(b_words, b_rows, KIND: gl.constexpr, W: gl.constexpr, A: gl.constexpr):
    """16 rows by 32 columns of each of W warps, as the first operand of its product.

    Args:
        b_words: int32 [W, 64] of 4 bits, two words of each lane, or [W, 128] of 8 bits.
        b_rows: int32 [W, 64], two equal words of each lane, which have, in bfloat16, what is added
            to rows 0 … 7 and to rows 8 … 15, or, of e2m1, what they are multiplied by; None
            without zero points.
    """
    if KIND == "int4" or KIND == "mxfp4" or KIND == "nvfp4":
        if b_rows is None:
            t = gl.inline_asm_elementwise(
                UNPACK_INT4, _EIGHT, [b_words], dtype=_PAIRS_8, is_pure=True, pack=2
            )
        else:
            t = gl.inline_asm_elementwise(
                UNPACK_INT4_ZEROS if KIND == "int4" else UNPACK_E2M1, _EIGHT_ROWS,
                [b_words, b_rows], dtype=_PAIRS_8, is_pure=True, pack=2,
            )  # fmt: skip
        b_0 = gl.join(gl.join(t[0], t[2]), gl.join(t[1], t[3]))
        b_1 = gl.join(gl.join(t[4], t[6]), gl.join(t[5], t[7]))
        # warp, row, lane of four, column of a pair, half of 16 columns, half of 16 rows, chunk
        b_a = gl.reshape(gl.join(b_0, b_1), [W, 8, 4, 2, 2, 2, 2])
        b_a = gl.permute(b_a, [0, 5, 1, 6, 4, 2, 3])
    else:
        if KIND == "fp8":
            t = gl.inline_asm_elementwise(
                UNPACK_FP8, _FOUR, [b_words], dtype=_PAIRS_4, is_pure=True, pack=2
            )
        else:
            t = gl.inline_asm_elementwise(
                UNPACK_INT8, _FOUR, [b_words], dtype=_PAIRS_4, is_pure=True, pack=2
            )
        # warp, row, lane of four, chunk, column of a pair, half of 16 columns, half of 16 rows
        b_a = gl.reshape(gl.join(gl.join(t[0], t[2]), gl.join(t[1], t[3])), [W, 8, 4, 2, 2, 2, 2])
        b_a = gl.permute(b_a, [0, 6, 1, 3, 5, 2, 4])
    b_a = gl.reshape(b_a, [W, 16, 32])
    return gl.convert_layout(b_a, gl.DotOperandLayout(0, A, 2), assert_trivial=True)
