"""Squared gradients of several sequences in one backward pass, exactly and without a gradient per sequence.

For a linear map the gradient of sequence b is Σ_t δ_bt ⊗ a_bt, with a its inputs and δ the gradients of its outputs.
One backward pass over a batch gives every δ, so each layer can square per sequence and add up a block at a time.

Shapes: B = sequences, T = positions, N = response tokens of the batch, R = response tokens of one sequence,
O, I = rows and columns of a weight, V = vocabulary, D = hidden width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fisher_lit.fisher.layers import Layer, embedding_scale, find_layers, norm_slope
from fisher_lit.logprobs import head_logits, hidden_states
from fisher_lit.rollout.batch import MicroBatch

# Logits that exist at a time, 64 MiB in float32; one sequence may have more.
LOGIT_ELEMENTS = 2**24


def block_elements(device: torch.device) -> int:
    """Elements of a temporary: few enough for a CPU's cache, or enough to fill a GPU (64 MiB in float32)."""
    return 2**19 if device.type == "cpu" else 2**24


def add_squared_products_(sum_OI: Tensor, delta_BTO: Tensor, input_BTI: Tensor) -> Tensor:
    """Add Σ_b (Σ_t δ_bt ⊗ a_bt)² to `sum_OI` in place, in its dtype.

    Args:
        sum_OI: the running sum.
        delta_BTO: gradients of a linear map's outputs, zero where a position does not count.
        input_BTI: the map's inputs.

    Returns:
        [B] squared Euclidean norm of each sequence's gradient, in the dtype of `sum_OI`.
    """
    batch, _, rows = delta_BTO.shape
    columns = input_BTI.shape[-1]
    block = max(1, block_elements(sum_OI.device) // (batch * columns))
    input_BTI = input_BTI.to(delta_BTO.dtype)
    norms_B = sum_OI.new_zeros(batch)
    for start in range(0, rows, block):
        delta_BOT = delta_BTO[:, :, start : start + block].transpose(1, 2)
        squares = torch.bmm(delta_BOT, input_BTI).to(sum_OI.dtype).square_()
        sum_OI[start : start + block] += squares.sum(0)
        norms_B += squares.sum((1, 2))
    return norms_B


def _add_squared_vectors_(sum_D: Tensor, terms: Tensor) -> Tensor:
    """Add Σ_b (Σ terms_b)², each sum over all but the first and last dimension; return [B] squared norms."""
    squares_BD = terms.to(sum_D.dtype).flatten(1, -2).sum(1).square_()
    sum_D += squares_BD.sum(0)
    return squares_BD.sum(1)


def add_squared_rows_(sum_VD: Tensor, ids_BT: Tensor, delta_BTD: Tensor, other_BTD: Tensor | None = None) -> Tensor:
    """Add the squares of per-sequence embedding gradients to `sum_VD` in place.

    A sequence's gradient has the rows e_v = Σ_{t: id_t = v} δ_t. With `other_BTD`, whose entry (b, t) is row id_bt of a
    second gradient o of the same weight, squared and added already, only the rest (e + o)² − o² = e (e + 2 o) is added.

    Args:
        sum_VD: the running sum.
        ids_BT: row looked up at each position.
        delta_BTD: gradients of the looked-up rows, zero where a position does not count.
        other_BTD: rows of the second gradient.

    Returns:
        [B] what was added for each sequence, summed over the weight.
    """
    same_BTT = ids_BT[:, :, None] == ids_BT[:, None, :]
    is_first_BT = ~same_BTT.tril(diagonal=-1).any(-1)
    rows_BTD = torch.bmm(same_BTT.to(delta_BTD.dtype), delta_BTD) * is_first_BT[..., None]
    rows_BTD = rows_BTD.to(sum_VD.dtype)
    added_BTD = rows_BTD.square() if other_BTD is None else rows_BTD * (rows_BTD + 2 * other_BTD)
    sum_VD.index_add_(0, ids_BT.flatten(), added_BTD.flatten(0, 1))
    return added_BTD.sum((1, 2))


class BatchedScores:
    """Sums of squared per-sequence gradients, several sequences per backward pass.

    Args:
        model: a model without obstacle (`batched_scores_obstacle`).
        sums: name of each measured parameter to its running sum, float32 or float64; written in place.
    """

    def __init__(self, model: PreTrainedModel, sums: dict[str, Tensor]) -> None:
        layers, obstacle = find_layers(model)
        assert obstacle is None, obstacle
        self.model = model
        self.sums = sums
        head = model.get_output_embeddings()
        self.head = next(layer for layer in layers if layer.module is head)
        self.body = [layer for layer in layers if layer.module is not head]
        self.is_tied = any(layer.weight == self.head.weight for layer in self.body)
        self._norms_B = torch.empty(0)
        self._head_rows_BTD: Tensor | None = None
        self._pending: set[nn.Module] = set()

    def add(self, batch: MicroBatch, value: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Square each sequence's gradient of a scalar function of its logits and add the squares to the sums.

        Args:
            batch: the sequences.
            value: takes the logits [C, V] (float32, or float64) of some of the batch's response tokens and their place
                among all N; returns the sum of the function over them. It must not mix tokens of different sequences.

        Returns:
            [B] squared Euclidean norm of each sequence's gradient over the measured parameters.
        """
        self._norms_B = next(iter(self.sums.values())).new_zeros(len(batch.input_ids))
        self._head_rows_BTD = None
        if self.is_tied and self.head.weight in self.sums:
            shape = (*batch.input_ids.shape, self.sums[self.head.weight].shape[1])
            self._head_rows_BTD = self._norms_B.new_zeros(shape)
        with self._hooks():
            hidden_ND = hidden_states(self.model, batch)
            grad_ND = self._head_backward(batch, hidden_ND.detach(), value)
            hidden_ND.backward(grad_ND)
        return self._norms_B

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Watch the body's layers, with no gradient for any parameter."""
        flags = {p: p.requires_grad for p in self.model.parameters()}
        handles = [layer.module.register_forward_hook(partial(self._watch, layer)) for layer in self.body]
        self._pending = {layer.module for layer in self.body}
        try:
            for parameter in flags:
                parameter.requires_grad_(False)
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter, flag in flags.items():
                parameter.requires_grad_(flag)

    def _watch(self, layer: Layer, module: nn.Module, args: tuple, output: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        if layer.kind == "embedding":
            # The start of the backward pass, as no parameter asks for a gradient.
            output.requires_grad_()
        if output.requires_grad:
            output.register_hook(partial(self._square, layer, args[0].detach()))

    def _square(self, layer: Layer, inputs: Tensor, delta: Tensor) -> None:
        """Add one layer's squares, from its inputs and the gradient of its outputs."""
        assert layer.module in self._pending, f"two gradients reached {layer.weight} in one backward pass"
        self._pending.discard(layer.module)
        weight, bias = self.sums.get(layer.weight), self.sums.get(layer.bias or "")
        with torch.autocast(delta.device.type, enabled=False), torch.no_grad():
            if layer.kind == "embedding":
                self._square_embedding(layer, inputs, delta)
                return
            if weight is not None and layer.kind == "linear":
                self._norms_B += add_squared_products_(weight, delta.flatten(1, -2), inputs.flatten(1, -2))
            elif weight is not None:
                slope = norm_slope(layer, inputs).to(weight.dtype)
                self._norms_B += _add_squared_vectors_(weight, delta * slope)
            if bias is not None:
                self._norms_B += _add_squared_vectors_(bias, delta)

    def _square_embedding(self, layer: Layer, ids_BT: Tensor, delta_BTD: Tensor) -> None:
        sum_VD = self.sums.get(layer.weight)
        if sum_VD is None:
            return
        module = cast(nn.Embedding, layer.module)
        delta_BTD = delta_BTD * embedding_scale(module)
        if module.padding_idx is not None:
            # Autograd gives this row no gradient, on real tokens neither.
            delta_BTD = delta_BTD * (ids_BT != module.padding_idx)[..., None]
        rows_BTD = self._head_rows_BTD if layer.weight == self.head.weight else None
        self._norms_B += add_squared_rows_(sum_VD, ids_BT, delta_BTD, rows_BTD)

    def _head_backward(self, batch: MicroBatch, hidden_ND: Tensor, value: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Add the head's squares, a few sequences at a time, and return the gradient of the hidden states."""
        head = cast(nn.Linear, self.head.module)
        ends = batch.response_mask.sum(-1).cumsum(0).tolist()
        limit = max(1, LOGIT_ELEMENTS // head.weight.shape[0])
        grads, first, start = [], 0, 0
        for b, end in enumerate(ends):
            if b + 1 < len(ends) and ends[b + 1] - start <= limit:
                continue
            tokens = slice(start, end)
            hidden_CD = hidden_ND[tokens].requires_grad_()
            raw: list[Tensor] = []
            handle = head.register_forward_hook(lambda _module, _args, output, raw=raw: raw.append(output))
            try:
                logits_CV = head_logits(self.model, hidden_CD)
            finally:
                handle.remove()
            logits_CV = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
            grad_CD, delta_CV = torch.autograd.grad(value(logits_CV, tokens), [hidden_CD, raw[0]])
            self._square_head(batch, slice(first, b + 1), tokens, hidden_CD.detach(), delta_CV)
            grads.append(grad_CD)
            first, start = b + 1, end
        return torch.cat(grads)

    def _square_head(self, batch: MicroBatch, rows: slice, tokens: slice, hidden_CD: Tensor, delta_CV: Tensor) -> None:
        """Add the head's squares of some sequences; keep its gradient on the rows that the embedding will need."""
        weight, bias = self.sums.get(self.head.weight), self.sums.get(self.head.bias or "")
        mask_BT = batch.response_mask[rows]
        sequence_C = batch.row[tokens] - rows.start
        # Place of each token within its response.
        place_C = (mask_BT.cumsum(-1) - 1)[mask_BT]
        shape = (len(mask_BT), int(place_C.max()) + 1)
        delta_BRV = delta_CV.new_zeros(*shape, delta_CV.shape[-1])
        delta_BRV[sequence_C, place_C] = delta_CV
        hidden_BRD = delta_CV.new_zeros(*shape, hidden_CD.shape[-1])
        hidden_BRD[sequence_C, place_C] = hidden_CD.to(delta_CV.dtype)
        with torch.autocast(delta_CV.device.type, enabled=False):
            norms_B = self._norms_B[rows]
            if bias is not None:
                norms_B += _add_squared_vectors_(bias, delta_BRV)
            if weight is None:
                return
            norms_B += add_squared_products_(weight, delta_BRV, hidden_BRD)
            if self._head_rows_BTD is not None:
                ids_BRT = batch.input_ids[rows, None, :].expand(-1, shape[1], -1)
                delta_BTR = delta_BRV.gather(2, ids_BRT).transpose(1, 2)
                self._head_rows_BTD[rows] = torch.bmm(delta_BTR, hidden_BRD).to(weight.dtype)
