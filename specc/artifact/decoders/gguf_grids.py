"""ggml's types of 1 to 3 bits, whose levels are points of grids or ternary, as scaled integers.

Each of them is s · level, with a scale for 16, 32 or 256 columns. Runs of 4 or 8 columns of an IQ
type are a point of a grid, by its number, and signs. A grid is some hundred of the points whose
coordinates are of a few values, in the order of these points as numbers of base 3 or 8, the first
coordinate the lowest digit; written down are the gaps between these numbers.

Source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h, ggml-quants.c
(`dequantize_row_iq2_xxs`, …), MIT license.
"""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.artifact.block_formats import half, take_bits

COLUMNS = 256
_SIGNS_7 = torch.tensor([i | (i.bit_count() & 1) << 7 for i in range(128)], dtype=torch.uint8)


@dataclass(frozen=True)
class GridType:
    """A type of blocks of 256 columns.

    Args:
        block_bytes: of a block.
        group: columns that share a scale.
        bits: of the engine's levels that hold its own, around the middle of their range; 0 where
            no layout has groups of so few columns.
        parts: takes blocks [n, bytes] to levels [n, 256] and scales [n, groups], float32.
    """

    block_bytes: int
    group: int
    bits: int
    parts: Callable[[Tensor], tuple[Tensor, Tensor]]

    def values(self, blocks: Tensor) -> Tensor:
        """[n, 256] float32 of blocks [n, bytes]."""
        levels, scales = self.parts(blocks)
        return (levels.view(*scales.shape, self.group) * scales.unsqueeze(-1)).flatten(1)


# coordinates, points, and gaps; a byte of 255 adds to the one after it
_COORDINATES = {
    "IQ2_XXS": (8, 25, 43), "IQ2_XS": (8, 25, 43), "IQ2_S": (8, 25, 43), "IQ1_S": (-1, 0, 1),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62), "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
}  # fmt: skip
_GAPS = {
    "IQ2_XXS": (
        "c-kdTL2AQ53@l<18zD>(%d(hdF=h$I1Y=ANrudLU2*rmIaws|GB|Y{5eM{fc?<Cq*hmn{WG13eC6@n><MkizoXsW"
        "~vl50RJDl2m7l>-VONs5<?--j^MS$$Sm_mIWXNRx`}`lhW;fD&tS8uoyGYhkh@T$HQ2=<b2X&%=K(TB9K%(VAd`r"
        "G%Wfo|dbUX6g;ijfNs*4E1onKv;J@VY4jnC?R!o%H{)xuU|kHBlGdCd?C4My_4Pbw(9+Z?_MWIx1arY>(hFFY{n;"
        "%BpCw"
    ),
    "IQ2_XS": (
        "c-mc%!D_=W42Fj=LI`7w5GD*0f+-=45K1XIj2?Q}X^fr6PCM<mXW1i9PS-4}!M3oZU!VUw*eti+xSS67FL`-Fv@M"
        "sA0bL-yX#&UF3Z@Jg9OUL##-WLLAqyp=3XYC%BydTt65=6PEV8>kIq+z*GW)c*p6E5X>FME0T6?4(7&|SEwM3XRc"
        "RrqMIwuW}zVW?-|Lj+~&14tJQUT`G52J~I9!I8xQ!ODXtTyR&V^FTvz_C448WI-5Jq}$WAE{)9uciu-SNIHV3@_r"
        "wx8vblsB8^L3!5<Z_VtJhWss=tq<zMi7!rLHB(5VvY&1Wsx_iWP599mLpSoRTrfI@r^qOTie5;y&d&C(g=;IGd78"
        "#)"
    ),
    "IQ2_S": (
        "c-nna!D_=W3>`)YVT=(bgiyjLVT4jf4<+QV<Gx|vutWd<1180>W2fl?O=U}cdhbbnGsOc>-w3cJF{L0LaJ@l_1s("
        "v1b{Ofw;)l5ecGzfFpcrGw9ZMQOKH>qzLJHPMXa~17hguKRt!t6Xo0X49k`I@iUy!UXFl5T7q>WOt%T?T34E|E85"
        "(q+qs7Rf}2t!WkbcRdE_su-?a^f*^J_%|3YF+P4b09QM0im3v$)1$>dX2D=f9ct?6)GTXL|aTQu6b8xy_eT~ym;$"
        "O{&AX3f0W*$UJaV_nXH;M^R>zA5k*#<*bA>SK>-qoJ%5YAm&TobK53l?U|K?4mZ#z^>~y*k+!9GT;z*5_&T)VvnX"
        "a8$;{ruIEM+exG)j1forhPTGY=|vG6Ot<{t<PZM(o=GWs}}P7YW1Qk$)$?-<sZ710T&F)7KfH"
    ),
    "IQ3_XXS": (
        "c-kF}K~ID*6ol>Y=mSb06<WIncY$3=(2yAM>`lE9|Np<Sc$j2nGWq5X$UzERK7x{E%D|>BQq5pcrG>PDxph7_HAr"
        "{vBYHv*cdV0O)CtUZJ2GE2q_ob^ZK1ZScNzajl$8UJ(A<+MzzJ!U^-L>Ga`ILG4HKV^$6)gVVbCMD!8Pq?(`jAzL"
        "mQUhji9F8H_GYz%P^Zs!k$647z^#<AY<`zPTxiRU1f8S^LUw`_0KfFFR}rub!+w7=MPrG<OZ}~fB7vBnE"
    ),
    "IQ3_S": (
        "c-keA+fKtk3`E)SE%DwGn$m`XR8*u2-Vy)*XL!rgt}T1!*nUchkWvDWSOpXxff0=yCnjRBRTfQ*L=h6}D5^9m6AY"
        "w`3Z~5QRnqP#h<ZksOlWI2JTjHHhvu*f2Q<*EDI8gh)X)@8gF?y42SVs2mQ`~gRalT5AC>*iRB;)gg;$;aB{8Hzd"
        "Av2IA}9_1=r|KO#Ng~P5Ai%&wPl^jh<7rXYsz(k_#1Crk>%Bfpp9)1TqnQ+VsVZjCftoB+-9)0Nri1yt`>dn^>DZ"
        "bZob7N;cvFMM7K(W8${TplNK2ae8Y22dx3xK>voo$b=Q!Lz7p36=J~3#i`J8*UZuoxikHuF!0#39cWm~!EcX8LtX"
        "Xs_(tlcSv~S1D7k-%LC@8vE?syxQvvogHdx=w@znAOj{s-R}55W"
    ),
    "IQ1_S": (
        "c-n1M*Mi$H3@e8yd1Umx|Nor@NGW!%)#YqagA<^CDTg(6ZJ|1H!iNh)l@?Bc)Bd&JA{v(QGvn*PW<<El3ojKJSWt"
        "+9xz^Z>Pl!)HmFi7gaoCSbtKUtiH;EyJ$%*4}w{CD6BgI|vq^7fCINL0yQ7i?#;D9g&48Ivj%cvY)({reVqvp-hT"
        "RgCfRV(+g!-Y>In6=a>b5UwCqs{o!p4T?CiYYhYw+=sjL^)UcNW%W4Xgy7*9`|9TW9wb}42KzW+ba`HK&9dm5pNf"
        "d@{)0)QlAq0T|$XsRH&HXqS?vfRTi<jGyWX71VgwhEW+4tHQKWR%%s6ICy^I$L)KOrZucsmUW(st07<4I6Q<K~Ky"
        "Q{0YUIcwL6iH|_Bd^eRfTzo$HHV~)aRRd%+zD&lUZs;&aSJLl_Z?$OxgkzdYjOX3<%o!m&dZMg@!~YtHog6tUb1$"
        "dlZI}B3^bw3BJVq#LM(bKVm7(o3Y|>>L-`x#@3QJn?%L7NG0_@pXmsf5&Lph?vP#9<TG@cw<Xv*sT02Iw3*yT5hQ"
        "2kyhL_n<h_-5rKcpn>J;&B=!TIiF|4~d6ITYaR=u1$6TIP*lJ-bKA#HFJgn)%eI+Mh}+93|4+XKjZk?86dlT#nM%"
        "<@ycdXqjEf;4S*%q=e?z6O9#>QsWj-NkoPdm*%>0w{xy7L$)AGI8!k9c)%Ej|mj9-mRKg5lntGy~3iGN#ruv1Fr*"
        "UqnGeN%j_hvquWNpsNzlrT%AnEvzjnmV_mF8Psmk=B)TIzeEC4LBUWqGegEO$<3@6nFp|(imhX#kd^agTkL1jZEy"
        "nZ;)zza?I(*F9;D-&~iiw~CjOhPxq`ody4+At?f{92D#NsRnfwZ%!dcs&X`aCXlEQhOoSTP(uaN9<GUQUAe@l~bk"
        "gO>D^mljRYD-D&w$JBo|#ovfNY<(=^&&<MX1hLq!Z-!w*lOzUgyCm`^XpS%I11&uUn}{CmaUJ=1`xnWK8KD"
    ),
}


@functools.cache
def grid(name: str) -> Tensor:
    """Points [count, 4 or 8] float32 of a grid."""
    coordinates, numbers, number = _COORDINATES[name], [], 0
    for gap in zlib.decompress(base64.b85decode(_GAPS[name])):
        number += gap
        if gap < 255:
            numbers.append(number)
    base = len(coordinates)
    digits = base ** torch.arange(8 if base == 3 else 4)
    places = torch.tensor(numbers).unsqueeze(1) // digits % base
    return torch.tensor(coordinates, dtype=torch.float32)[places]


def _words(data: Tensor, kind: torch.dtype) -> Tensor:
    """[n, numbers] int64 of little-endian numbers."""
    count = torch.iinfo(kind).bits // 8
    places = 8 * torch.arange(count)
    return (data.long().unflatten(-1, (-1, count)) << places).sum(-1)


def _points(name: str, numbers: Tensor, signs: Tensor | None = None) -> Tensor:
    """Levels [n, 256] of points' numbers [n, …], and bytes of signs [n, 32]."""
    found = grid(name)[numbers.flatten(1).long()].flatten(1)
    if signs is None:
        return found
    is_minus = take_bits(signs.flatten(1), 1, 1)
    return torch.where(is_minus == 0, found, -found)


def _packed_signs(words: Tensor) -> Tensor:
    """Bytes [n, 4 · words] of words, 7 bits for 8 columns: the eighth makes their count even."""
    sevens = (words.unsqueeze(-1) >> torch.tensor([0, 7, 14, 21])) & 127
    return _SIGNS_7[sevens].flatten(1)


def _iq2_xxs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    own = blocks[:, 2:].unflatten(1, (8, 8))
    words = _words(own[..., 4:], torch.int32).flatten(1)
    scales = half(blocks, 0) * (0.5 + (words >> 28).float()) * 0.25
    return _points("IQ2_XXS", own[..., :4], _packed_signs(words)), scales


def _iq2_xs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    words = _words(blocks[:, 2:66], torch.int16)
    scales = half(blocks, 0) * (0.5 + take_bits(blocks[:, 66:], 1, 4).float()) * 0.25
    return _points("IQ2_XS", words & 511, _SIGNS_7[words >> 9]), scales


def _iq2_s(blocks: Tensor) -> tuple[Tensor, Tensor]:
    numbers = blocks[:, 2:34].long() | take_bits(blocks[:, 66:74], 1, 2).long() << 8
    scales = half(blocks, 0) * (0.5 + take_bits(blocks[:, 74:], 1, 4).float()) * 0.25
    return _points("IQ2_S", numbers, blocks[:, 34:66]), scales


def _iq3_xxs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    words = _words(blocks[:, 66:], torch.int32)
    scales = half(blocks, 0) * (0.5 + (words >> 28).float()) * 0.5
    return _points("IQ3_XXS", blocks[:, 2:66], _packed_signs(words)), scales


def _iq3_s(blocks: Tensor) -> tuple[Tensor, Tensor]:
    numbers = blocks[:, 2:66].long() | take_bits(blocks[:, 66:74], 1, 1).long() << 8
    scales = half(blocks, 0) * (1 + 2 * take_bits(blocks[:, 106:], 1, 4)).float()
    return _points("IQ3_S", numbers, blocks[:, 74:106]), scales


def _iq1_s(blocks: Tensor) -> tuple[Tensor, Tensor]:
    words = _words(blocks[:, 34:], torch.int16)
    high = (words.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9])) & 7
    points = _points("IQ1_S", blocks[:, 2:34].long() | high.flatten(1) << 8)
    shift = torch.where(words >> 15 == 0, 1, -1).repeat_interleave(32, 1)
    # points and their shifts of an eighth, in eighths
    return 8 * points + shift, half(blocks, 0) * (2 * (words >> 12 & 7) + 1).float() / 8


def _iq1_m(blocks: Tensor) -> tuple[Tensor, Tensor]:
    words = _words(blocks[:, 48:], torch.int16)
    # fp16 in the highest bits of four words
    bits = (words >> 12 << torch.tensor([0, 4, 8, 12])).sum(1, keepdim=True)
    d = torch.where(bits >= 1 << 15, bits - (1 << 16), bits).short().view(torch.float16).float()
    scales = (words.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9])) & 7
    high = take_bits(blocks[:, 32:48], 1, 4)
    points = _points("IQ1_S", blocks[:, :32].long() | (high & 7).long() << 8)
    shift = torch.where(high & 8 == 0, 1, -1).repeat_interleave(8, 1)
    return 8 * points + shift, d * (2 * scales.flatten(1) + 1).float() / 8


def _tq1_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    def digits(data: Tensor, width: int, count: int) -> Tensor:
        """Of bytes, each of which is a fraction with so many digits of base 3."""
        powers = torch.tensor([3**i for i in range(count)], dtype=torch.uint8).unsqueeze(1)
        left = data.unflatten(1, (-1, 1, width)) * powers  # what is over 255 is gone
        return (left.short() * 3 >> 8).flatten(1)

    parts = (
        digits(blocks[:, :32], 32, 5),
        digits(blocks[:, 32:48], 16, 5),
        digits(blocks[:, 48:52], 4, 4),
    )
    return torch.cat(parts, 1).float() - 1, half(blocks, 52)


def _tq2_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return take_bits(blocks[:, :64], 32, 2).float() - 1, half(blocks, 64)


# by ggml's names
GRIDS = {
    "IQ2_XXS": GridType(66, 32, 8, _iq2_xxs), "IQ2_XS": GridType(74, 16, 0, _iq2_xs),
    "IQ2_S": GridType(82, 16, 0, _iq2_s), "IQ3_XXS": GridType(98, 32, 8, _iq3_xxs),
    "IQ3_S": GridType(110, 32, 8, _iq3_s), "IQ1_S": GridType(50, 32, 8, _iq1_s),
    "IQ1_M": GridType(56, 16, 0, _iq1_m), "TQ1_0": GridType(54, 256, 4, _tq1_0),
    "TQ2_0": GridType(66, 256, 4, _tq2_0),
}  # fmt: skip
