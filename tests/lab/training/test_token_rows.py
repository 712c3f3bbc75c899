"""Shards: whole or not there, and together every answer once."""

import numpy as np

from jaxspec.lab.training.token_rows import TokenRows, next_shard, read_shards


def test_shards_come_back_in_the_order_of_the_prompts(tmp_path):
    rows = [(4, [7, 8], True), (1, [5], False), (3, [], True)]
    TokenRows.of(rows[:2]).save(next_shard(tmp_path))
    TokenRows.of(rows[2:]).save(next_shard(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-00000.npz", "shard-00001.npz"]
    read = [(index, tokens.tolist(), stopped) for index, tokens, stopped in read_shards(tmp_path).rows()]
    assert read == sorted(rows)


def test_a_half_written_shard_is_not_read(tmp_path):
    TokenRows.of([(0, [1, 2, 3], True)]).save(next_shard(tmp_path))
    whole = (tmp_path / "shard-00000.npz").read_bytes()
    (tmp_path / "shard-00001.npz.part").write_bytes(whole[: len(whole) // 2])
    assert read_shards(tmp_path).index.tolist() == [0]
    assert next_shard(tmp_path).name == "shard-00001.npz"


def test_no_shards_are_no_rows(tmp_path):
    empty = read_shards(tmp_path)
    assert len(empty) == 0
    assert empty.tokens.dtype == np.int32
