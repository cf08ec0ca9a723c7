"""Flash-Decoding compiled, on a GPU: real sizes, repeats, wide strides, graphs, and its speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from decoding import decode, exact, lengths, make, normal, paged

from flashbench import calibrate, decode_configs, decoding, environment, presets

pytestmark = pytest.mark.gpu

LLAMA = presets.find("llama-3-8b")


def step(**changes) -> decoding.Step:
    return decoding.Step(**{"preset": LLAMA, "kv_len": 32768, "batch": 2, **changes})


STEPS = [
    *(step(page_size=page, dtype=dtype) for page in (0, 16, 256) for dtype in ("bf16", "fp16")),
    *(step(kv_len=10007, page_size=page, queries=5, splits=7) for page in (0, 24)),
    *(step(kv_len=4099, queries=64, batch=1, page_size=page) for page in (0, 1)),
    *(step(kv_len=5000, preset=presets.find(name)) for name in ("gpt2-small", "qwen2.5-7b", "gpt-oss-120b")),
    step(kv_len=3001, dtype="fp32", queries=3),
]


@pytest.mark.parametrize("one", STEPS, ids=lambda s: f"{s.problem.key} page{s.page_size} splits{s.splits}")
def test_real_sizes_are_right(one: decoding.Step) -> None:
    row = decoding.check(one, environment.target("cuda"))
    assert row["status"] == "ok", row


@pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="no e4m3 conversion before sm_89")
@pytest.mark.parametrize("page_size", [0, 16, 256])
def test_fp8_caches_are_right(page_size: int) -> None:
    row = decoding.check(step(page_size=page_size, dtype="fp8"), environment.target("cuda"))
    assert row["status"] == "ok", row


def test_every_configuration_of_the_table_is_right() -> None:
    q, cache = make(lengths(3000, 0, 1), heads=(8, 2), seqlen_q=2, dims=(128, 128), dtype=torch.bfloat16)
    ref, _ = exact(q, cache)
    for config in dict.fromkeys(c for row in decode_configs.TABLE for c in row.configs if c.block_k <= 64):
        for one in (cache, paged(cache, 16), paged(cache, 64)):
            o = decode.flash_decode(q, one, config=config)
            assert float((o.double() - ref).abs().max()) < 1e-2, config


def test_a_thousand_repeats_are_bit_identical() -> None:
    q, cache = make(lengths(9000, 17), heads=(32, 8), dims=(128, 128), dtype=torch.bfloat16)
    first = decode.flash_decode(q, cache)
    for _ in range(1000):
        assert torch.equal(decode.flash_decode(q, cache), first)


def test_more_than_two_to_the_31_elements() -> None:
    flat = torch.empty(100 * 2**25, dtype=torch.float16, device="cuda")
    for shape, strides in (((3, 1, 100, 128), (2**30, 0, 128, 1)), ((1, 1, 100, 128), (0, 0, 2**25, 1))):
        view = flat.as_strided(shape, strides)
        view.copy_(normal(*shape))
        q = normal(shape[0], 4, 1, 128, seed=3)
        far, near = decode.Cache(k=view, v=view), decode.Cache(k=view.contiguous(), v=view.contiguous())
        assert torch.equal(decode.flash_decode(q, far), decode.flash_decode(q, near))
    pages = flat[: 2**31 + 2**30].view(-1, 16, 1, 128)  # the last pages begin past 2**31 elements
    table = torch.arange(len(pages) - 7, len(pages), dtype=torch.int32, device="cuda")[None]
    tail = pages[-7:]
    tail.copy_(normal(*tail.shape))
    near = tail.reshape(1, 1, 112, 128)
    q = normal(1, 4, 1, 128, seed=3)
    far = decode.flash_decode(q, decode.Cache(k=pages, v=pages, block_table=table))
    assert torch.equal(far, decode.flash_decode(q, decode.Cache(k=near, v=near)))


def test_append_and_decode_in_a_graph_follow_the_lengths() -> None:
    q, cache = make(lengths(40, 7), heads=(8, 2), dims=(64, 64), capacity=64)
    new = [normal(2, 2, 1, 64, seed=seed) for seed in (5, 6)]
    used = cache.seqused_k
    after = used + 1
    for x in (cache.k, cache.v):
        x.nan_to_num_(0.0)
    decode.append(cache, *new)
    decode.flash_decode(q, replace(cache, seqused_k=after))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode.append(cache, *new)
        o = decode.flash_decode(q, replace(cache, seqused_k=after))
    for grown in (1, 5):
        used += grown
        after += grown
        graph.replay()
        ref, _ = exact(q, replace(cache, seqused_k=lengths(*after.tolist())))
        assert float((o.double() - ref).abs().max()) < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "least"), [(0, 0.85), (16, 0.80)])
def test_decoding_comes_near_a_copys_bandwidth(page_size: int, least: float) -> None:
    target = environment.target("cuda")
    copy = calibrate.measure_one("copy_bytes_per_s", target)["value"]
    for batch in (1, 16):
        for kv_len in (32768, 131072):
            row = decoding.measure(step(batch=batch, kv_len=kv_len, page_size=page_size), target, copy)
            assert row["copy_fraction"] >= least, row
