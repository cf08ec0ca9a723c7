"""What people type means one thing, and what does not parse says what would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashbench import units
from flashbench.errors import FlashbenchError, SpecError, UnknownName


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("512", (512,)),
        ("512,1k,3k", (512, 1024, 3072)),
        ("1k-64k", (1024, 2048, 4096, 8192, 16384, 32768, 65536)),
        ("1k-8k+1k", tuple(range(1024, 8193, 1024))),
        ("1-2", (1, 2)),
        (" 1K , 3-12 ", (1024, 3, 6, 12)),
        ("1m", (2**20,)),
        ("7,1k-2k,4k-6k+1k", (7, 1024, 2048, 4096, 5120, 6144)),
    ],
)
def test_axis(text: str, values: tuple[int, ...]) -> None:
    assert units.parse_axis(text, "--seqlens") == values


@pytest.mark.parametrize(
    "text",
    ["", " ", ",", "1,", ",1", "1,,2", "0", "-1", "-", "k", "1-", "-1k", "1k-3k", "1k-1k", "2k-1k", "0-4",
     "1k-8k+3k", "1k-8k+0", "1k-8k+", "1-2-3", "1+2", "1.5k", "1e3", "0x10", "1_000", "１", "1g", "NaN",
     "inf", "9" * 5000, "1,1", "1k,1024", "1-4,2", "1-5000+1", "3000000000", "1\n2", "\0", "naïve"],
)  # fmt: skip
def test_bad_axis_names_option_value_and_what_is_accepted(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        units.parse_axis(text, "--seqlens")
    message = str(caught.value)
    assert message.startswith("--seqlens ")
    assert units.quoted(text) in message
    assert "accepted: " in message
    assert "\n" not in message
    assert len(message) < 300


def test_a_range_that_does_not_land_offers_both_ends() -> None:
    with pytest.raises(SpecError, match="doubling from 1024 passes 3072") as caught:
        units.parse_axis("1k-3k", "--seqlens")
    assert "2k or 4k" in caught.value.hint


@given(st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=20, unique=True))
def test_axis_reads_back_what_format_length_writes(values: list[int]) -> None:
    text = ",".join(units.format_length(value) for value in values)
    assert units.parse_axis(text, "--x") == tuple(values)


@given(st.text(max_size=40))
def test_no_text_makes_a_parser_crash(text: str) -> None:
    parsers = [
        units.parse_axis,
        units.parse_int,
        units.parse_bytes,
        units.parse_duration,
        lambda t, o: units.parse_names(t, o, ("a", "b")),
        lambda t, o: units.parse_choice(t, o, ("a", "b")),
    ]
    for parser in parsers:
        try:
            parser(text, "--x")
        except FlashbenchError as error:
            assert str(error).startswith("--x ")  # noqa: PT017
            assert len(str(error).splitlines()) == 1  # noqa: PT017


@pytest.mark.parametrize(("text", "value"), [("64k", 65536), ("1m", 2**20), ("7", 7), ("16K", 16384)])
def test_int(text: str, value: int) -> None:
    assert units.parse_int(text, "--batch") == value


@pytest.mark.parametrize("text", ["", "0", "-1", "1.0", "1e3", "x", "1,2", "4294967296", "1k-2k"])
def test_bad_int(text: str) -> None:
    with pytest.raises(SpecError, match=r"^--batch .*accepted: "):
        units.parse_int(text, "--batch")


@pytest.mark.parametrize("text", ["192KB", "192KiB", "196608", "0.1875MiB", "192 kb", "196608B", "0.1875mb"])
def test_every_way_to_write_192_kib(text: str) -> None:
    assert units.parse_bytes(text, "--sram") == 196_608


@pytest.mark.parametrize(
    "text", ["", "0", "0KB", "-1KB", "0.0001KB", "KB", "192 KBs", "1e3", "1,5MB", "192kbit", "."]
)
def test_bad_bytes(text: str) -> None:
    with pytest.raises(SpecError, match=r"^--sram .*accepted: "):
        units.parse_bytes(text, "--sram")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300), ("90s", 90), ("1h30m", 5400), ("1.5h", 5400), ("250ms", 0.25), ("1m1s", 61)],
)
def test_duration(text: str, seconds: float) -> None:
    assert units.parse_duration(text, "--time-budget") == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "0s", "-5m", "5min", "m", "30m1h", "5m5m", "1e3s", "5 parsecs", "nans"]
)
def test_bad_duration(text: str) -> None:
    with pytest.raises(SpecError, match=r"^--time-budget .*accepted: "):
        units.parse_duration(text, "--time-budget")


def test_names_keep_their_order() -> None:
    assert units.parse_names("sdpa, naive", "--impls", ("naive", "sdpa")) == ("sdpa", "naive")


def test_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"--impls 'flahs'.*did you mean 'flash'.*naive"):
        units.parse_names("naive,flahs", "--impls", ("naive", "flash"))


@pytest.mark.parametrize("text", ["", ",", "naive,", "naive,naive"])
def test_bad_names(text: str) -> None:
    with pytest.raises(SpecError, match=r"^--impls .*accepted: "):
        units.parse_names(text, "--impls", ("naive", "flash"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (7e-10, "0.70 ns"), (4.3e-6, "4.30 us"), (9.996e-6, "10.0 us"), (1.234e-3, "1.23 ms"),
     (0.9996, "1.00 s"), (12.34, "12.3 s"), (99.7, "1m 40s"), (3599.4, "59m 59s"), (3599.6, "1h 00m"),
     (5400, "1h 30m")],
)  # fmt: skip
def test_format_seconds(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (999_999, "1.00 MB"), (274_877_906_944, "275 GB"), (8_650_752, "8.65 MB")],
)
def test_format_bytes_is_decimal(value: int, text: str) -> None:
    assert units.format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1023, "1023 B"), (2**30, "1.00 GiB"), (196_608, "192 KiB")]
)
def test_format_bytes_binary_says_so(value: int, text: str) -> None:
    assert units.format_bytes(value, binary=True) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (6.5e14, "FLOP/s", "650 TFLOP/s"),
        (3.35e12, "B/s", "3.35 TB/s"),
        (12, "FLOP", "12 FLOP"),
        (0.5, "x", "0.50 x"),
    ],
)
def test_format_rate(value: float, unit: str, text: str) -> None:
    assert units.format_rate(value, unit) == text


@given(st.integers(1, 2**60))
def test_formatted_bytes_are_within_a_percent(value: int) -> None:
    for binary, base in ((False, 1000), (True, 1024)):
        number, unit = units.format_bytes(value, binary=binary).split()
        power = " kMGTPE".find(unit[0].lower() if unit[0] == "k" else unit[0]) if unit != "B" else 0
        power = max(power, "  KMGTPE".find(unit[0]) - 1 if binary and unit != "B" else 0)
        assert float(number) * base**power == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize("text", ["-1", "99999999999999999999", "512,-1"])
def test_a_number_outside_the_range_is_told_from_what_is_no_number(text: str) -> None:
    with pytest.raises(SpecError, match=r"is out of range; accepted: 1 to 4096"):
        units.parse_axis(text, "--head-dims", maximum=4096)
    with pytest.raises(SpecError, match=r"out of range|not a whole number"):
        units.parse_int(text, "--batch", maximum=4096)
