"""Adding tokens to a sequence, one by one, until something ends it.

Every end is decided here and nowhere else, in the order of the tokens: the earliest event wins,
wherever it falls inside an accepted run.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outrider.request import FinishReason, Sequence, TokenLogprob


def emit(
    seq: Sequence, tokens: Seq[int], logits: torch.Tensor, *, rows: Seq[int]
) -> list[TokenLogprob]:
    """Append ``tokens`` to ``seq`` until it ends; sets ``seq.finish``, text and log-probabilities.

    ``logits`` ``[1 + N, V]``: the target's unprocessed ones; token i was chosen after tree node
    ``rows[i]``. Returns the log-probabilities, if wanted, of the tokens that were appended.
    """
    params = seq.params
    logprobs: list[TokenLogprob] = []
    for i, token in enumerate(tokens):
        if params.logprobs is not None:
            logprobs.append(_logprob(logits[rows[i] + 1].float(), token, params.logprobs))
        seq.append(token)
        seq.finish = _end(seq, token)
        if seq.finish is not None:
            seq.detokenizer.finish()
            break
    seq.logprobs.extend(logprobs)
    return logprobs


def _end(seq: Sequence, token: int) -> FinishReason | None:
    may_stop = seq.num_output >= seq.params.min_tokens
    if may_stop and token in seq.end_tokens:
        return FinishReason.STOP  # the end token itself is counted, but is no text
    if seq.detokenizer.push(token, may_stop=may_stop):
        return FinishReason.STOP
    if len(seq.tokens) >= seq.max_length:
        return FinishReason.LENGTH
    return None


def _logprob(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    law = torch.log_softmax(logits, dim=-1)
    top = law.topk(min(num_top, len(law)))
    return TokenLogprob(
        token=token,
        logprob=float(law[token]),
        top=tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
    )
