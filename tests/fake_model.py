"""A language model without weights, for tests of everything around a model.

Its logits are a hash of the tokens that a query can see and of how far back each of them is, so
a wrong mask, slot or position changes them. What it remembers of a token is kept in a pool,
slot by slot, as a real model keeps keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from outrider.batch import ForwardBatch, Row
from outrider.kv import KVCache
from outrider.models.base import Forward

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_LOGITS, _OWN, _EARLY, _HIDDEN, _KEYS = (np.array([i * 1_000_003], np.uint64) for i in range(5))


class FakeModel:
    """The Model protocol over hashes.

    ``scale``: logits lie in ``[-scale, scale]``; the larger, the more peaked the laws.
    ``noise``: how much of a second hash, keyed by ``noise_seed``, is added: two models of one
    ``seed`` and a small noise agree often, which makes one a good draft model of the other.
    A forward of fewer than ``num_layers`` layers adds ``early_noise`` in the same way.
    ``windows``: attention windows as in a real model; with only a narrow one, text repeats itself.
    ``absolute``: whether the logits depend on a query's own position, beside the distances.
    ``break_at(token, position)``: a number that is none (NaN, inf) to fill the logits of that
    token's query with, or None. The slot is then broken until it is scrubbed or written again,
    and breaks every query whose keys are read from around it, seen or not, as a NaN does that
    attention multiplies by 0.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 32,
        context_length: int = 256,
        num_slots: int = 1024,
        num_layers: int = 4,
        hidden_size: int = 8,
        windows: tuple[int | None, ...] = (None,),
        seed: int = 0,
        scale: float = 4.0,
        noise: float = 0.0,
        noise_seed: int = 1,
        early_noise: float = 1.0,
        absolute: bool = True,
        break_at: Callable[[int, int], float | None] | None = None,
        prefix_cache: bool = True,
    ) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.num_layers = num_layers
        self.hidden_size = hidden_size
        self.windows = windows
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.kv = KVCache(num_slots, prefix_cache=prefix_cache)
        self.seed = seed
        self.scale = scale
        self.noise = noise
        self.noise_seed = noise_seed
        self.early_noise = early_noise
        self.absolute = absolute
        self.break_at = break_at
        self.num_forwards = 0
        self.num_computed = 0
        # What a slot holds before it is written is garbage that no token looks like.
        self._tokens = np.random.default_rng(seed).integers(10**6, 10**9, num_slots)
        self._positions = np.zeros(num_slots, np.int64)
        self._layers = np.zeros(num_slots, np.int64)
        self._broken = np.zeros(num_slots, np.bool_)

    def forward(
        self,
        batch: ForwardBatch,
        *,
        hidden_layers: Seq[int] = (),
        num_layers: int | None = None,
    ) -> Forward:
        """Logits of the hash of what each query sees; the batch's tokens are kept in the pool."""
        layers = self.num_layers if num_layers is None else num_layers
        ids, positions = batch.input_ids.numpy(), batch.positions.numpy()
        slots = batch.write_slots.numpy()
        assert len(np.unique(slots)) == len(slots), "two tokens are written to one slot"
        assert ((ids >= 0) & (ids < self.vocab_size)).all(), f"token out of vocabulary: {ids}"
        assert ((positions >= 0) & (positions < self.context_length)).all(), "outside the context"
        self.num_forwards += 1
        self.num_computed += len(ids)
        self._tokens[slots], self._positions[slots] = ids, positions
        self._layers[slots] = layers
        fills = self._break(ids, positions, slots)
        states = np.zeros(len(ids), np.uint64)
        for row in batch.rows:
            states[row.start : row.stop] = self._row_states(row, positions, layers, fills)
        index = batch.logit_index.numpy()
        logits = self._logits(states[index], layers)
        for i, fill in enumerate(fills[index].tolist()):
            if fill != 0.0:
                logits[i] = fill
        hidden = torch.from_numpy(self._hidden(states, hidden_layers)) if hidden_layers else None
        return Forward(logits=torch.from_numpy(logits), hidden=hidden)

    def scrub(self, slots: Seq[int]) -> None:
        """Forget what the slots hold."""
        index = np.asarray(slots, np.int64)
        self._tokens[index] = self._positions[index] = self._layers[index] = 0
        self._broken[index] = False

    def plain_logits(self, tokens: Seq[int], *, num_layers: int | None = None) -> torch.Tensor:
        """Logits after the last of ``tokens``, computed from the tokens alone: ``[V]``."""
        layers = self.num_layers if num_layers is None else num_layers
        return torch.from_numpy(self._logits(self._plain_states(tokens)[-1:], layers)[0])

    def plain_hidden(self, tokens: Seq[int], hidden_layers: Seq[int]) -> torch.Tensor:
        """Hidden states of all ``tokens``: ``[n, len(hidden_layers) * hidden_size]``."""
        return torch.from_numpy(self._hidden(self._plain_states(tokens), hidden_layers))

    # What a query sees, as one 64-bit word.

    def _row_states(
        self, row: Row, positions: Ints, layers: int, fills: npt.NDArray[np.float32]
    ) -> Words:
        keys = np.arange(row.first, row.last) if row.slots is None else row.slots.numpy()
        # Layers that did not write a key read garbage there.
        tokens = np.where(self._layers[keys] >= layers, self._tokens[keys], -1)
        query = positions[row.start : row.stop]
        visible = []
        for window in self.windows:
            mask = row.masks[window]
            shape = (len(query), len(keys))
            visible.append(np.ones(shape, np.bool_) if mask is None else mask.numpy() == 0.0)
            assert visible[-1].shape == shape, f"mask {visible[-1].shape}, expected {shape}"
        if self._broken[keys].any():
            own = fills[row.start : row.stop]
            own[own == 0.0] = np.nan
        return self._states(tokens, self._positions[keys], query, visible)

    def _plain_states(self, tokens: Seq[int]) -> Words:
        place = np.arange(len(tokens))
        back = place[:, None] - place[None, :]
        visible = [(back >= 0) & (True if w is None else back < w) for w in self.windows]
        return self._states(np.asarray(tokens, np.int64), place, place, visible)

    def _states(
        self, tokens: Ints, key_positions: Ints, query: Ints, visible: list[npt.NDArray[np.bool_]]
    ) -> Words:
        back = (query[:, None] - key_positions[None, :]).astype(np.uint64)
        keys = _mix(_mix(tokens.astype(np.uint64) + _KEYS)[None, :] + _mix(back))
        state = np.zeros(len(query), np.uint64)
        if self.absolute:
            state = _mix(query.astype(np.uint64) + _OWN)
        for mask in visible:
            state = _mix(state + np.where(mask, keys, np.uint64(0)).sum(1, dtype=np.uint64))
        return state

    def _break(self, ids: Ints, positions: Ints, slots: Ints) -> npt.NDArray[np.float32]:
        """What to fill each query's logits with; 0 for nothing. Marks the slots."""
        fills = np.zeros(len(ids), np.float32)
        if self.break_at is not None:
            for i, (token, position) in enumerate(
                zip(ids.tolist(), positions.tolist(), strict=True)
            ):
                fills[i] = self.break_at(token, position) or 0.0
        self._broken[slots] = fills != 0.0
        return fills

    # From the word to numbers.

    def _logits(self, states: Words, layers: int) -> npt.NDArray[np.float32]:
        logits = self.scale * self._spread(states, _LOGITS + np.uint64(self.seed), self.vocab_size)
        if self.noise:
            key = _OWN + np.uint64(self.noise_seed)
            logits += self.noise * self._spread(states, key, self.vocab_size)
        if layers < self.num_layers:
            key = _EARLY + np.uint64(layers)
            logits += self.early_noise * self._spread(states, key, self.vocab_size)
        return logits.astype(np.float32)

    def _hidden(self, states: Words, hidden_layers: Seq[int]) -> npt.NDArray[np.float32]:
        parts = [
            self._spread(states, _HIDDEN + np.uint64(layer), self.hidden_size)
            for layer in hidden_layers
        ]
        return np.concatenate(parts, 1).astype(np.float32)

    def _spread(self, states: Words, key: Words, num: int) -> npt.NDArray[np.float64]:
        """``[len(states), num]`` numbers from -1 to 1."""
        lanes: Words = np.arange(num, dtype=np.uint64)
        lanes = _mix(_mix(key) + lanes)
        words = _mix(states[:, None] + lanes[None, :])
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0


def _mix(words: Words) -> Words:
    """The finaliser of splitmix64 (Steele et al. 2014): every bit of input moves half of the
    output's bits."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
