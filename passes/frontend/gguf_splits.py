"""How text is split into words before pairs of bytes are merged, by `tokenizer.ggml.pre`.

    split = SPLITS["llama-bpe"]

A split is a sequence of patterns. Each cuts what the ones before it have left: its matches, and
what lies between them, are words of their own. Where the tokenizer.json that a model was published
with is known, the patterns are its own; llama.cpp writes some of them for regular expressions with
fewer features.
Source: llama.cpp, src/llama-vocab.cpp, `llm_tokenizer_bpe` and `llama_vocab::impl::load`, where
comments quote the patterns of tokenizer.json; transformers, models/*/tokenization_*.py and
integrations/gguf/gguf_tokenizer_mapping.py; Kimi K2, tokenization_kimi.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """What a name of `tokenizer.ggml.pre` says.

    Args:
        patterns: in the order of their use, for Oniguruma, which the library tokenizers has.
        takes_words: a word that is a token is that token, whatever merges would make of it.
        adds_bos: texts begin with the token bos, where the file does not say otherwise.
        is_composed: text gets Unicode's form NFC first, as the model's own tokenizer does it;
            llama.cpp does not.
    """

    patterns: tuple[str, ...]
    takes_words: bool = False
    adds_bos: bool = False
    is_composed: bool = False


def _ranges(codes: str) -> str:
    """Characters and ranges of them, for a class, of their numbers in hexadecimal."""
    items = (item.split("-") for item in codes.split())
    return "".join("-".join(chr(int(end, 16)) for end in ends) for ends in items)


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LINES, _BLANKS = r"\s*[\r\n]+", r"\s+(?!\S)|\s+"
_SPACES = rf"{_LINES}|{_BLANKS}"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_BLANKS}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(ending: str = "", but: str = "") -> str:
    """Words of capital letters and then small ones, either of which may be missing."""
    start, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    return rf"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}"


_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT4O = rf"{_cased(_ENDINGS + '?')}|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}"
_TEKKEN = rf"{_cased()}|\p{{N}}|{_PATHS}|{_SPACES}"
_NO_HAN = r"&&[^\p{Han}]"
_KIMI = rf"\p{{Han}}+|{_cased(_ENDINGS + '?', _NO_HAN)}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
# digits in groups of three, the first of which may be shorter
_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_JAPANESE = f"[{_ranges('4E00-9FA5 3040-309F 30A0-30FF')}]+"
_OLD_CJK = f"[{_ranges('4E00-9FA5 800-4E00 AC00-D7FF')}]+"
_ASIAN = (
    "["
    + _ranges(
        "4E00-9FFF 3400-4DBF 8C48-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF"
        " 1780-17FF 1000-109F AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
    )
    + "]+"
)
_KOREAN, _BOPOMOFO = f"[{_ranges('AC00-D7A3 3131-318E')}]+", f"[{_ranges('3105-312F')}]+"
_CHINESE_SIGNS = (
    f"[{_ranges('FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F')}]+"
)
# letters that have a capital and a small form
_CASED_LETTERS = _ranges(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F "
    "386 388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD "
    "1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 "
    "1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 "
    "2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 "
    "2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 "
    "A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943 "
)
_DEEPSEEK_SIGNS = rf"\s?[!-/:-~{_ranges('FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+"
_SIGN_AND_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK3_WORDS = rf"{_SIGN_AND_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_BLOOM = rf" ?[^(\s|.,!?{_ranges('2026 3002 FF0C 3001 964 6D4 60C')})]+"
_STEPS = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))

_SPLIT_GPT2 = Split((_GPT2,))
_SPLIT_DIGITS = Split((r"\p{N}", _GPT2))
_SPLIT_LLAMA3 = Split((_LLAMA3,), takes_words=True, adds_bos=True)
_SPLIT_QWEN2 = Split((_QWEN2,), is_composed=True)
_SPLIT_DEEPSEEK3 = Split((r"\p{N}{1,3}", _JAPANESE, _DEEPSEEK3))
_SPLIT_GLM4 = Split((_LLAMA3,), takes_words=True)
_SPLIT_GPT4O = Split((_GPT4O,))
_SPLIT_BLOOM = Split((_BLOOM,))
_SPLIT_BAILING = Split(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        rf"|\s*[\r\n]|{_BLANKS}",
    )
)
_SPLIT_AYA = Split((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O), is_composed=True)

SPLITS: Mapping[str, Split] = {
    "llama-bpe": _SPLIT_LLAMA3,
    "llama3": _SPLIT_LLAMA3,
    "llama-v3": _SPLIT_LLAMA3,
    "falcon3": _SPLIT_LLAMA3,
    "falcon-h1": _SPLIT_LLAMA3,
    "pixtral": _SPLIT_LLAMA3,
    "midm-2.0": _SPLIT_LLAMA3,
    "lfm2": _SPLIT_LLAMA3,
    "jina-v5-nano": _SPLIT_LLAMA3,
    "dbrx": Split((_LLAMA3,)),
    "smaug-bpe": Split((_LLAMA3,)),
    "chatglm-bpe": Split((_LLAMA3,)),
    "glm4": _SPLIT_GLM4,
    "glm5": _SPLIT_GLM4,
    "minicpm5": Split((r"\p{N}{1,3}", rf"{_WORDS}|\p{{N}}+|{_SIGNS}|{_SPACES}"), takes_words=True),
    "jais-2": Split((rf"{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}|{_STEPS}|\s",)),
    "tekken": Split((_TEKKEN,), takes_words=True, adds_bos=True),
    "gpt-4o": _SPLIT_GPT4O,
    "llama4": _SPLIT_GPT4O,
    "kanana2": _SPLIT_GPT4O,
    "talkie": _SPLIT_GPT4O,
    "minimax-m2": _SPLIT_GPT4O,
    "tiny_aya": _SPLIT_AYA,
    "cohere2moe": _SPLIT_AYA,
    "kimi-k2": Split((_KIMI,)),
    "youtu": Split(
        (
            f"{_KOREAN}|{_CHINESE_SIGNS}|{_BOPOMOFO}|{_JAPANESE}",
            rf"{_cased(_ENDINGS + '?')}|\p{{N}}|{_PATHS}|{_SPACES}",
        ),
        takes_words=True,
    ),
    "qwen2": _SPLIT_QWEN2,
    "deepseek-r1-qwen": _SPLIT_QWEN2,
    "kormo": _SPLIT_QWEN2,
    "f2llmv2": _SPLIT_QWEN2,
    "megrez": _SPLIT_QWEN2,
    "qwen35": Split((_QWEN35,), is_composed=True),
    "stablelm2": Split((_QWEN2,), is_composed=True),
    "hunyuan": Split((_QWEN2,)),
    "solar-open": Split((_QWEN2,)),
    "grok-2": Split((_QWEN2,)),
    "laguna": Split((r"[^\n]+|[\n]+", _QWEN2)),
    "seed-coder": Split(
        (rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    ),
    "ufakzeka": Split((rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SIGNS}|{_SPACES}",)),
    "bailingmoe": _SPLIT_BAILING,
    "bailingmoe2": _SPLIT_BAILING,
    "llada-moe": _SPLIT_BAILING,
    "exaone-moe": Split(
        (
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_BLANKS}",
        )
    ),
    "deepseek-llm": Split(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            _DEEPSEEK_SIGNS,
            r"\s+$",
            _OLD_CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OLD_CJK, r"\p{N}")),
    "deepseek-v3": _SPLIT_DEEPSEEK3,
    "hunyuan-dense": _SPLIT_DEEPSEEK3,
    "joyai-llm": _SPLIT_DEEPSEEK3,
    "hy_v4": _SPLIT_DEEPSEEK3,
    "spark2_5": Split(
        (
            r"\p{N}{1,3}",
            _JAPANESE,
            rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_BLANKS}",
            r"\p{N}",
        )
    ),
    "afmoe": Split((_THREES, _ASIAN, _DEEPSEEK3)),
    "superbpe": Split((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "falcon": Split((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "starcoder": _SPLIT_DIGITS,
    "refact": _SPLIT_DIGITS,
    "command-r": Split((r"\p{N}", _GPT2), is_composed=True),
    "smollm": _SPLIT_DIGITS,
    "codeshell": _SPLIT_DIGITS,
    "exaone": _SPLIT_DIGITS,
    "minerva-7b": _SPLIT_DIGITS,
    "mellum2": _SPLIT_DIGITS,
    "gpt-2": _SPLIT_GPT2,
    "phi-2": _SPLIT_GPT2,
    "gigachat": _SPLIT_GPT2,
    "a.x-4.0": _SPLIT_GPT2,
    "mellum": _SPLIT_GPT2,
    "exaone4": _SPLIT_GPT2,
    "jais": _SPLIT_GPT2,
    "trillion": _SPLIT_GPT2,
    "granite-docling": _SPLIT_GPT2,
    # the tokenizers of GPT-NeoX
    "mpt": Split((_GPT2,), is_composed=True),
    "olmo": Split((_GPT2,), is_composed=True),
    "bloom": _SPLIT_BLOOM,
    "poro-chat": _SPLIT_BLOOM,
    "gpt3-finnish": _SPLIT_BLOOM,
    "viking": Split((_BLOOM, r"\p{N}")),
    "chameleon": Split(
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_bos=True,
    ),
    # what llama.cpp takes for files that name no split, and says that output gets worse by it
    "default": Split((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
