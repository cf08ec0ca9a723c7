"""A block mask is the mask it was built from, in both of its orders, whatever the lengths."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from attention import problem
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench.errors import FlashbenchError
from flashbench.kernels import _block_mask
from flashbench.kernels._block_mask import BlockMask, build, from_blocks, from_elements, from_flex

LENGTHS = [(1, 1), (128, 128), (300, 300), (129, 517), (517, 129), (256, 640)]


def made(name: str, lengths: tuple[int, int], seed: int = 0, **changes) -> BlockMask:
    p = problem(seqlen_q=lengths[0], seqlen_k=lengths[1], block_mask=name, **changes)
    return build(p, "cpu", seed)


def positions(lengths: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(lengths[0])[:, None], torch.arange(lengths[1])[None, :]


def listed(mask: BlockMask, transposed: bool) -> dict[tuple[int, int], int]:
    """(query block, key block) → -1 for a full block, else the slot of a partial one, as listed."""
    lists = mask.by_key if transposed else mask.by_query
    found = {}
    for block in range(len(lists.full_starts) - 1):
        for other in lists.full[lists.full_starts[block] : lists.full_starts[block + 1]].tolist():
            found[block, other] = -1
        for at in range(int(lists.partial_starts[block]), int(lists.partial_starts[block + 1])):
            found[block, int(lists.partial[at])] = int(lists.slots[at])
    return {pair[:: -1 if transposed else 1]: slot for pair, slot in found.items()}


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_mask_is_kept_to_the_bit(data: st.DataObject) -> None:
    lengths = data.draw(st.tuples(st.integers(1, 400), st.integers(1, 400)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    wanted = torch.rand(lengths, generator=generator) < 0.5
    size = _block_mask.BLOCK_MASK_SIZE
    for i in range(0, lengths[0], size):  # of each kind of block some
        for j in range(0, lengths[1], size):
            kind = data.draw(st.sampled_from(["empty", "full", "partial"]))
            if kind != "partial":
                wanted[i : i + size, j : j + size] = kind == "full"
    mask = from_elements(lambda i, j: wanted[i, j], *lengths, "cpu")
    assert torch.equal(mask.dense(), wanted)
    rows, columns = (torch.randint(0, n, (7,), generator=generator) for n in lengths)
    assert torch.equal(mask.dense(rows, columns), wanted[rows][:, columns])
    blocks = listed(mask, transposed=False)
    assert blocks == listed(mask, transposed=True)
    assert sorted(slot for slot in blocks.values() if slot >= 0) == list(range(len(mask.bits)))
    for (i, j), slot in blocks.items():
        tile = wanted[i * size : (i + 1) * size, j * size : (j + 1) * size]
        assert tile.all() if slot < 0 else tile.any() and not tile.all()
    assert (
        sum(wanted[i * size : (i + 1) * size, j * size : (j + 1) * size].sum() for i, j in blocks)
        == wanted.sum()
    )


@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_causal_and_window_follow_the_diagonal(lengths: tuple[int, int], alignment: str) -> None:
    i, j = positions(lengths)
    shift = lengths[1] - lengths[0] if alignment == "bottom-right" else 0
    assert torch.equal(made("causal", lengths, alignment=alignment).dense(), j <= i + shift)
    assert torch.equal(made("window", lengths, alignment=alignment).dense(), (i + shift - j).abs() <= 256)


def test_a_causal_mask_has_partial_blocks_on_the_diagonal_only() -> None:
    mask = made("causal", (512, 512))
    assert mask.by_query.partial.tolist() == [0, 1, 2, 3]
    assert mask.by_query.full_starts.tolist() == [0, 0, 1, 3, 6]
    assert mask.density == 10 / 16


def test_butterfly_joins_blocks_that_differ_in_one_bit() -> None:
    seen = made("butterfly", (1024, 1024)).dense()[::128, ::128]
    for i in range(8):
        assert seen[i].nonzero().flatten().tolist() == sorted({i, i ^ 1, i ^ 2, i ^ 4})


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("lengths", [(1280, 1280), (640, 1280), (1280, 300)])
def test_random_has_its_density_and_keeps_every_query_block_a_key_block(lengths, density: float) -> None:
    mask = made(f"random:{density}", lengths, seed=3)
    query_blocks, key_blocks = (-(-n // 128) for n in lengths)
    count = max(query_blocks, round(density * query_blocks * key_blocks))
    assert mask.density == count / (query_blocks * key_blocks)
    assert mask.dense().any(1).all()
    assert torch.equal(mask.dense(), made(f"random:{density}", lengths, seed=3).dense())
    if density == 0.5:
        assert not torch.equal(mask.dense(), made(f"random:{density}", lengths, seed=4).dense())


@pytest.mark.parametrize("lengths", [(300, 300), (129, 517), (5, 4)])
def test_documents_see_themselves_alone(lengths: tuple[int, int]) -> None:
    cuts = _block_mask._cuts(lengths[1], seed=1)
    assert len(cuts) == min(8, lengths[1])
    names = [number for number, length in enumerate(cuts) for _ in range(length)]
    seen = made("document", lengths, seed=1).dense()
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
    mask = from_blocks(torch.zeros(2, 2, dtype=torch.bool), 200, 200, "cpu")
    assert mask.density == 0
    assert not mask.dense().any()
