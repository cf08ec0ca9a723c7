"""A block mask is the mask it was built from, in both of its orders, whatever the lengths."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from attention import problem
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench import block_masks, named_masks
from flashbench.block_masks import EMPTY, FULL, SIZE
from flashbench.errors import FlashbenchError
from flashbench.kernels._block_mask import DeviceMask, build, from_flex

LENGTHS = [(1, 1), (128, 128), (300, 300), (129, 517), (517, 129), (256, 640)]


def made(name: str, lengths: tuple[int, int], **changes) -> DeviceMask:
    return build(problem(seqlen_q=lengths[0], seqlen_k=lengths[1], block_mask=name, **changes), "cpu")


def positions(lengths: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(lengths[0])[:, None], torch.arange(lengths[1])[None, :]


def listed(mask: DeviceMask, transposed: bool) -> dict[tuple[int, int], int]:
    """(query block, key block) → FULL, or the slot of a partial one, as listed."""
    lists = mask.by_key if transposed else mask.by_query
    found = {}
    length = mask.shape[0 if transposed else 1]
    for row, (first, middle, end) in enumerate(lists.spans.tolist()):
        for full, part in ((True, range(first, middle)), (False, range(middle, end))):
            entries = slice(part.start // SIZE, -(-part.stop // SIZE))
            blocks, slots = lists.blocks[entries].tolist(), lists.slots[entries].tolist()
            assert blocks == sorted(blocks)
            assert all((slot == FULL) == full for slot in slots)
            assert len(part) == sum(min(SIZE, length - SIZE * block) for block in blocks)
            found |= {(row, block): slot for block, slot in zip(blocks, slots, strict=True)}
    return {pair[:: -1 if transposed else 1]: slot for pair, slot in found.items()}


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_mask_is_kept_to_the_bit(data: st.DataObject) -> None:
    lengths = data.draw(st.tuples(st.integers(1, 400), st.integers(1, 400)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    wanted = torch.rand(lengths, generator=generator) < 0.5
    size = SIZE
    for i in range(0, lengths[0], size):  # of each kind of block some
        for j in range(0, lengths[1], size):
            kind = data.draw(st.sampled_from(["empty", "full", "partial"]))
            if kind != "partial":
                wanted[i : i + size, j : j + size] = kind == "full"
    mask = DeviceMask(block_masks.from_elements(wanted.numpy()), "cpu")
    assert torch.equal(mask.dense(), wanted)
    rows, columns = (torch.randint(0, n, (7,), generator=generator) for n in lengths)
    assert torch.equal(mask.dense(rows, columns), wanted[rows][:, columns])
    blocks = listed(mask, transposed=False)
    assert blocks == listed(mask, transposed=True)
    assert sorted(slot for slot in blocks.values() if slot >= 0) == list(range(len(mask.bits)))
    for (i, j), slot in blocks.items():
        tile = wanted[i * size : (i + 1) * size, j * size : (j + 1) * size]
        whole = tile.all() and tile.shape == (size, size)
        assert whole if slot == FULL else tile.any() and not whole
    assert (
        sum(wanted[i * size : (i + 1) * size, j * size : (j + 1) * size].sum() for i, j in blocks)
        == wanted.sum()
    )
    host = mask.host
    seen = host.visible_pairs, host.queries_with_keys, host.keys_with_queries
    assert seen == (wanted.sum(), wanted.any(1).sum(), wanted.any(0).sum())


@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_causal_and_window_follow_the_diagonal(lengths: tuple[int, int], alignment: str) -> None:
    i, j = positions(lengths)
    shift = lengths[1] - lengths[0] if alignment == "bottom-right" else 0
    assert torch.equal(made("causal", lengths, alignment=alignment).dense(), j <= i + shift)
    assert torch.equal(made("window", lengths, alignment=alignment).dense(), (i + shift - j).abs() <= 256)


def test_a_causal_mask_has_partial_blocks_on_the_diagonal_only() -> None:
    mask = made("causal", (512, 512))
    starts = [[0, 0, 1], [1, 2, 3], [3, 5, 6], [6, 9, 10]]
    assert mask.by_query.spans.tolist() == [[128 * start for start in row] for row in starts]
    assert mask.by_query.blocks.tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2, 3, 0]
    assert (mask.host.density, mask.host.grows) == (10 / 16, True)


def test_butterfly_joins_blocks_that_differ_in_one_bit() -> None:
    seen = made("butterfly", (1024, 1024)).dense()[::128, ::128]
    for i in range(8):
        assert seen[i].nonzero().flatten().tolist() == sorted({i, i ^ 1, i ^ 2, i ^ 4})


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("lengths", [(1280, 1280), (640, 1280), (1280, 300)])
def test_random_has_its_density_and_keeps_every_query_block_a_key_block(lengths, density: float) -> None:
    mask = made(f"random:{density}", lengths)
    query_blocks, key_blocks = (-(-n // 128) for n in lengths)
    count = max(query_blocks, round(density * query_blocks * key_blocks))
    assert mask.host.density == count / (query_blocks * key_blocks)
    assert mask.dense().any(1).all()
    if density == 0.5:
        one, other = (named_masks.random(10, 10, density, seed) for seed in (0, 1))
        assert (one != other).any()


@pytest.mark.parametrize("lengths", [(300, 300), (129, 517), (5, 4)])
def test_documents_see_themselves_alone(lengths: tuple[int, int]) -> None:
    cuts = named_masks.cuts(lengths[1], seed=0)
    assert len(cuts) == min(8, lengths[1])
    names = [number for number, length in enumerate(cuts) for _ in range(length)]
    seen = made("document", lengths).dense()
    shift = lengths[1] - lengths[0]
    for i in range(lengths[0]):
        mine = [at >= 0 and name == names[at] for at in [i + shift] for name in names]
        assert seen[i].tolist() == mine


@pytest.mark.parametrize("lengths", [(256, 256), (300, 200)])
def test_a_flex_attention_mask_is_taken(lengths: tuple[int, int]) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    documents = torch.arange(400) // 90
    i, j = positions(lengths)

    def mod(b, h, q, k):
        return (documents[q] == documents[k]) | (k == 0)

    mask = from_flex(create_block_mask(mod, None, None, *lengths, device="cpu"))
    assert torch.equal(mask.dense(), (documents[i] == documents[j]) | (j == 0))
    per_head = create_block_mask(mod, None, 2, *lengths, device="cpu")
    with pytest.raises(ValueError, match="batches and heads"):
        from_flex(per_head)
    with pytest.raises(ValueError, match=r"blocks of \(64, 64\)"):
        from_flex(create_block_mask(mod, None, None, *lengths, device="cpu", BLOCK_SIZE=64))


def test_a_flex_mask_without_partial_blocks_is_asked_nothing() -> None:
    """A table of pairs could not be indexed with none."""
    from torch.nn.attention.flex_attention import create_block_mask

    table = torch.ones(256, 256, dtype=torch.bool)
    table[:128, 128:] = False
    flex = create_block_mask(lambda b, h, i, j: table[i, j], None, None, 256, 256, device="cpu")
    assert torch.equal(from_flex(flex).dense(), table)


def test_flex_evaluates_its_function_on_partial_blocks_only() -> None:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    def mod(b, h, q, k):
        return q < 0  # hides everything: a full block must not ask it

    counts, indices = torch.tensor([[[0, 1]]]), torch.tensor([[[[0, 1], [1, 0]]]])
    flex = FlexMask.from_kv_blocks(
        counts.int(), indices.int(), torch.tensor([[[1, 0]]]).int(), indices.int(),
        BLOCK_SIZE=128, mask_mod=mod, seq_lengths=(256, 256),
    )  # fmt: skip
    seen = from_flex(flex).dense()
    assert seen[:128, :128].all()
    assert seen.sum() == 128 * 128


@pytest.mark.parametrize("shape", [(3, 2), (300, 200)])
def test_a_file_holds_blocks_or_elements(tmp_path: Path, shape: tuple[int, int]) -> None:
    matrix = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    path = tmp_path / "mask.npz"
    numpy.savez(path, matrix.numpy())
    seen = made(str(path), (300, 200)).dense()
    wanted = (
        matrix.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200] if shape[0] == 3 else matrix
    )
    assert torch.equal(seen, wanted)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": numpy.zeros((3, 3), bool)}, "holds bool (3, 3); it must be one boolean matrix of (3, 2)"),
        ({"a": numpy.zeros((3, 2))}, "holds float64 (3, 2)"),
        ({"a": numpy.zeros((3, 2), bool), "b": numpy.zeros(1)}, "float64 (1,)"),
        ({"a": numpy.array([object()])}, "cannot be read"),
        (None, "cannot be read"),
    ],
)  # fmt: skip
def test_a_file_without_a_mask_is_refused_in_a_line(
    tmp_path: Path, arrays: dict | None, message: str
) -> None:
    path = tmp_path / "mask.npz"
    if arrays is not None:
        numpy.savez(path, **arrays)
    with pytest.raises(FlashbenchError) as raised:
        made(str(path), (300, 200))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_blocks_may_all_be_empty() -> None:
    mask = DeviceMask(block_masks.from_blocks(numpy.zeros((2, 2), bool), 200, 200), "cpu")
    assert mask.host.density == mask.host.visible_pairs == 0
    assert not mask.dense().any()


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_both_of_two_masks_is_what_both_show(data: st.DataObject) -> None:
    lengths = data.draw(st.tuples(st.integers(1, 300), st.integers(1, 300)))
    low, high = sorted(data.draw(st.tuples(st.integers(-300, 300), st.integers(-300, 300))))
    mask = made(data.draw(st.sampled_from(["window", "document", "random:0.5"])), lengths)
    i, j = positions(lengths)
    wanted = mask.dense() & (j - i >= low) & (j - i <= high)
    assert torch.equal(mask.within(low, high).dense(), wanted)
    again = block_masks.from_elements(wanted.numpy())
    assert (mask.within(low, high).host.slots == again.slots).all()
    assert mask.within(low, high) is mask.within(low, high)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_pairs_and_rows_of_a_problem_are_those_of_its_mask(data: st.DataObject) -> None:
    p = problem(
        seqlen_q=data.draw(st.integers(1, 300)), seqlen_k=data.draw(st.integers(1, 300)),
        causal=data.draw(st.booleans()), block_mask=data.draw(st.sampled_from(["document", "random:0.4"])),
        window=data.draw(st.sampled_from([(-1, -1), (40, 9)])), batch=2,
        alignment=data.draw(st.sampled_from(["top-left", "bottom-right"])),
    )  # fmt: skip
    i, j = positions((p.seqlen_q, p.seqlen_k))
    seen = build(p, "cpu").dense() & (j - i >= p.band[0]) & (j - i <= p.band[1])
    assert p.visible_pairs == 2 * p.num_heads * seen.sum()
    assert p.rows_without_keys == p.seqlen_q - seen.any(1).sum()
    assert p.keys_without_queries == p.seqlen_k - seen.any(0).sum()


def test_a_file_that_changes_is_another_mask(tmp_path: Path) -> None:
    path = tmp_path / "mask.npz"
    numpy.savez(path, numpy.ones((2, 2), bool))
    assert made(str(path), (200, 200)).host.visible_pairs == 200 * 200
    numpy.savez(path, numpy.eye(200, dtype=bool))
    assert made(str(path), (200, 200)).host.visible_pairs == 200


def test_blocks_off_a_boundary_are_not_looked_into() -> None:
    """64k x 64k: the bits of what a boundary cuts are all that is made."""
    mask = made("causal", (2**16, 2**16)).host
    assert mask.bits.shape == (512, SIZE, SIZE // 32)
    assert (mask.slots == EMPTY).sum() == (mask.slots == FULL).sum() == 512 * 511 // 2
