"""Decodes pages by the encodings of the web, which pages and servers name by labels.

The table is that of the Encoding Standard (WHATWG), as far as Python has codecs. Other codecs of
Python never decode a page: some of them take hours for a few megabytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping

_LABELS: Mapping[str, str] = {
    "utf-8": """
        unicode-1-1-utf-8 unicode11utf8 unicode20utf8 utf-8 utf8 x-unicode20utf8
    """,
    "cp866": """
        866 cp866 csibm866 ibm866
    """,
    "iso-8859-2": """
        csisolatin2 iso-8859-2 iso-ir-101 iso8859-2 iso88592 iso_8859-2 iso_8859-2:1987 l2
        latin2
    """,
    "iso-8859-3": """
        csisolatin3 iso-8859-3 iso-ir-109 iso8859-3 iso88593 iso_8859-3 iso_8859-3:1988 l3
        latin3
    """,
    "iso-8859-4": """
        csisolatin4 iso-8859-4 iso-ir-110 iso8859-4 iso88594 iso_8859-4 iso_8859-4:1988 l4
        latin4
    """,
    "iso-8859-5": """
        csisolatincyrillic cyrillic iso-8859-5 iso-ir-144 iso8859-5 iso88595 iso_8859-5
        iso_8859-5:1988
    """,
    "iso-8859-6": """
        arabic asmo-708 csiso88596e csiso88596i csisolatinarabic ecma-114 iso-8859-6
        iso-8859-6-e iso-8859-6-i iso-ir-127 iso8859-6 iso88596 iso_8859-6 iso_8859-6:1987
    """,
    "iso-8859-7": """
        csisolatingreek ecma-118 elot_928 greek greek8 iso-8859-7 iso-ir-126 iso8859-7
        iso88597 iso_8859-7 iso_8859-7:1987 sun_eu_greek
    """,
    "iso-8859-8": """
        csiso88598e csiso88598i csisolatinhebrew hebrew iso-8859-8 iso-8859-8-e
        iso-8859-8-i iso-ir-138 iso8859-8 iso88598 iso_8859-8 iso_8859-8:1988 logical
        visual
    """,
    "iso-8859-10": """
        csisolatin6 iso-8859-10 iso-ir-157 iso8859-10 iso885910 l6 latin6
    """,
    "iso-8859-13": """
        iso-8859-13 iso8859-13 iso885913
    """,
    "iso-8859-14": """
        iso-8859-14 iso8859-14 iso885914
    """,
    "iso-8859-15": """
        csisolatin9 iso-8859-15 iso8859-15 iso885915 iso_8859-15 l9
    """,
    "iso-8859-16": """
        iso-8859-16
    """,
    "koi8-r": """
        cskoi8r koi koi8 koi8-r koi8_r
    """,
    "koi8-u": """
        koi8-ru koi8-u
    """,
    "mac-roman": """
        csmacintosh mac macintosh x-mac-roman
    """,
    "cp874": """
        dos-874 iso-8859-11 iso8859-11 iso885911 tis-620 windows-874
    """,
    "cp1250": """
        cp1250 windows-1250 x-cp1250
    """,
    "cp1251": """
        cp1251 windows-1251 x-cp1251
    """,
    "cp1252": """
        ansi_x3.4-1968 ascii cp1252 cp819 csisolatin1 ibm819 iso-8859-1 iso-ir-100
        iso8859-1 iso88591 iso_8859-1 iso_8859-1:1987 l1 latin1 us-ascii windows-1252
        x-cp1252
    """,
    "cp1253": """
        cp1253 windows-1253 x-cp1253
    """,
    "cp1254": """
        cp1254 csisolatin5 iso-8859-9 iso-ir-148 iso8859-9 iso88599 iso_8859-9
        iso_8859-9:1989 l5 latin5 windows-1254 x-cp1254
    """,
    "cp1255": """
        cp1255 windows-1255 x-cp1255
    """,
    "cp1256": """
        cp1256 windows-1256 x-cp1256
    """,
    "cp1257": """
        cp1257 windows-1257 x-cp1257
    """,
    "cp1258": """
        cp1258 windows-1258 x-cp1258
    """,
    "mac-cyrillic": """
        x-mac-cyrillic x-mac-ukrainian
    """,
    "gb18030": """
        chinese csgb2312 csiso58gb231280 gb18030 gb2312 gb_2312 gb_2312-80 gbk iso-ir-58
        x-gbk
    """,
    "big5hkscs": """
        big5 big5-hkscs cn-big5 csbig5 x-x-big5
    """,
    "euc-jp": """
        cseucpkdfmtjapanese euc-jp x-euc-jp
    """,
    "iso-2022-jp": """
        csiso2022jp iso-2022-jp
    """,
    "cp932": """
        csshiftjis ms932 ms_kanji shift-jis shift_jis sjis windows-31j x-sjis
    """,
    "cp949": """
        cseuckr csksc56011987 euc-kr iso-ir-149 korean ks_c_5601-1987 ks_c_5601-1989
        ksc5601 ksc_5601 windows-949
    """,
    "utf-16-be": """
        unicodefffe utf-16be
    """,
    "utf-16-le": """
        csunicode iso-10646-ucs-2 ucs-2 unicode unicodefeff utf-16 utf-16le
    """,
}
"""The labels of each encoding, by the name of Python's codec."""

_CODECS = {label: codec for codec, labels in _LABELS.items() for label in labels.split()}

_MORE_LABELS = {"latin-1": "cp1252", "utf_8": "utf-8"}
"""Labels that servers use although the standard lacks them."""

_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_MARK = "\ufeff"


def find_codec(label: str) -> str | None:
    """Return Python's codec for a label of the web; None for an unknown label."""
    label = label.strip("\t\n\f\r ").lower()
    return _CODECS.get(label) or _MORE_LABELS.get(label)


def marked_codec(content: bytes) -> str | None:
    """Return the codec that a byte order mark at the beginning names; None without one."""
    return next((codec for mark, codec in _MARKS.items() if content.startswith(mark)), None)


def decode_page(content: bytes, label: str | None) -> str:
    """Return the text of a page, without its byte order mark.

    `label` is the stated encoding, or None. A byte order mark overrides it. Content that does not
    fit its encoding but is UTF-8 is read as UTF-8. Invalid bytes become U+FFFD.
    """
    if (codec := marked_codec(content)) is not None:
        return content.decode(codec, "replace").removeprefix(_MARK)
    if label is None:
        codec = "cp1252"  # the default of the web
        attempts = ["utf-8"]
    else:
        codec = find_codec(label) or "utf-8"
        attempts = [codec, "utf-8"]
    for name in attempts:
        try:
            return content.decode(name).removeprefix(_MARK)
        except UnicodeError:
            continue
    return content.decode(codec, "replace").removeprefix(_MARK)
