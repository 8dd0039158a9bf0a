"""Parses requests for forward and backward passes into a batch. Used by `app`.

A body is checked as a whole before any work on it begins, and errors name the datum and the field. A request with images is parsed in two
parts, and between them its images are read.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from offbeat.algorithms.objectives import CLIENT_LOSSES, client_loss, reads_of
from offbeat.config.objectives import objective_of
from offbeat.data.batch import Batch, LossSpec
from offbeat.data.ranges import bounds
from offbeat.errors import DataError
from offbeat.service.errors import BadRequestError, RequestError, TooLargeError
from offbeat.service.types import Layout, TrainingData
from offbeat.service.wire.chunks import ImageChunk, Joined, Piece, ReadImages, check_count, image_chunk, images_in, join
from offbeat.service.wire.limits import WireLimits
from offbeat.service.wire.proto import Message, decode_proto
from offbeat.service.wire.tensors import Tensor, read_tensor

_INPUTS = {"loss_weights": "weights", "rollout_logprobs": "logprobs", "advantages": "advantages", "ratio_mask": "sequence_ratio_mask"}
"""Columns of a batch, with their names in the protocol. Only cross-entropy takes weights; elsewhere an advantage of 0 trains nothing."""
_CONSTANTS = {"clip_low": "clip_low_threshold", "clip_high": "clip_high_threshold", "beta": "beta"}
_TOKEN = np.dtype("<i4")
_TRAINING = frozenset(("weights", "advantages", "sequence_ratio_mask"))
"""Inputs that say which targets are trained, where they are not 0."""
_UNPUBLISHED = "stable_reinforce"
"""A loss of the hosted service whose formula is not public."""


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    """A forward pass over datums, followed by a backward pass unless `forward_only`."""

    model_id: str
    seq_id: int
    forward_only: bool
    data: TrainingData


@dataclass(frozen=True, eq=False)
class UnreadPass:
    """A request for a pass whose images, of all datums in order, have not been read."""

    model_id: str
    seq_id: int
    images: tuple[ImageChunk, ...]
    _message: Message
    _limits: WireLimits
    _loss: LossSpec
    _inputs: "tuple[tuple[Piece, ...], ...]"

    def read(self, images: ReadImages) -> ForwardBackward:
        """Parse the rest of the request; raises as `read_forward_backward`."""
        with _placed(self._message):
            reader = _DatumReader(self._loss, self._limits)
            for index, (datum, pieces) in enumerate(zip(self._message["data"], self._inputs, strict=True)):
                reader.add(f"data[{index}]", datum, pieces, images)
            return ForwardBackward(self.model_id, self.seq_id, self._message.get("forward_only", False), reader.batch())


def read_forward_backward(body: bytes, *, limits: WireLimits, stable_reinforce: str = "") -> ForwardBackward | UnreadPass:
    """Parse a request for a pass, as far as its images allow.

    Without `weights`, cross_entropy gives every stored target the weight 1, and those that are an image's tokens 0.

    Args:
        stable_reinforce: name of the loss that is used for "stable_reinforce", with its own default settings; empty refuses that loss.

    Raises:
        BadRequestError: the request is invalid.
        TooLargeError: the request exceeds a limit. Either error carries the model and the number of the request if they could be read.
    """
    message: Message = {}
    with _placed(message):
        decode_proto("ForwardBackwardRequest", body, max_fields=limits.max_fields, into=message)
        model_id, seq_id = message.get("model_id", ""), message.get("seq_id", 0)
        if not model_id or seq_id < 1:
            raise BadRequestError(f"model_id must be given and seq_id at least 1, got {model_id[:80]!r} and {seq_id}")
        loss, data = _loss(message, stable_reinforce), message.get("data", [])
        if not data:
            raise BadRequestError("data must hold at least one datum")
        if len(data) > limits.max_datums:
            raise TooLargeError(f"data must hold at most {limits.max_datums} datums, got {len(data)}; send them in several requests")
        inputs = tuple(_pieces(f"data[{index}].model_input", datum.get("model_input", []), limits) for index, datum in enumerate(data))
    unread = UnreadPass(model_id, seq_id, tuple(image for pieces in inputs for image in images_in(pieces)), message, limits, loss, inputs)
    return unread if unread.images else unread.read({})


@contextmanager
def _placed(message: Message) -> Iterator[None]:
    """Give errors the model and the number of a request, as far as they are known."""
    try:
        yield
    except RequestError as exc:
        exc.model_id, exc.seq_id = message.get("model_id", ""), message.get("seq_id", 0)
        raise


def _pieces(name: str, chunks: Sequence[Message], limits: WireLimits) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for index, chunk in enumerate(chunks):
        if chunk.keys() == {"image"}:
            image = chunk["image"]
            pieces.append(image_chunk(
                f"{name}.chunks[{index}]", image.get("data", b""), image.get("format", ""), image.get("expected_tokens"), limits=limits,
                resized="override_dimensions" in image))
            continue
        if chunk.keys() != {"encoded_text"}:
            kind = " and ".join(chunk) or "nothing"
            raise BadRequestError(f"{name} holds {kind}; this server takes encoded_text, and image for a model that reads images")
        data = chunk["encoded_text"].get("tokens", b"")
        if len(data) % _TOKEN.itemsize:
            raise BadRequestError(f"{name} must hold int32 tokens of 4 bytes, got {len(data)} bytes")
        pieces.append(np.frombuffer(data, _TOKEN))
    check_count(name, pieces, limits)
    return tuple(pieces)


def _loss(message: Message, stand_in: str) -> LossSpec:
    name = message.get("loss_fn", "")
    if name == _UNPUBLISHED:
        if not stand_in:
            raise BadRequestError(
                f"this server has no loss {_UNPUBLISHED!r}, whose formula is not public; set loss_fn to one of "
                f"{', '.join(CLIENT_LOSSES)}, or have another loss stand in for it by serve.{_UNPUBLISHED} on the server")
        return client_loss(stand_in)  # the settings sent along belong to the other formula
    if name not in CLIENT_LOSSES:
        raise BadRequestError(f"this server has no loss {name[:80]!r}; set loss_fn to one of {', '.join(CLIENT_LOSSES)}")
    given = {key: value.get("number", value.get("text")) for key, value in message.get("loss_fn_config_v2", {}).items()}
    given = given or message.get("loss_fn_config", {})
    known = {_CONSTANTS[constant]: constant for constant in CLIENT_LOSSES[name]}
    for key, value in given.items():
        if key not in known:
            raise BadRequestError(f"loss_fn_config of {name} has no {key[:80]!r}; it has {', '.join(known) or 'no settings'}")
        if not isinstance(value, float):
            raise BadRequestError(f"{key} in loss_fn_config must be a number, got {str(value)[:80]!r}")
    try:
        return client_loss(name, **{known[key]: value for key, value in given.items()})
    except DataError as exc:
        raise BadRequestError(f"loss_fn_config is wrong: {exc}") from exc


class _DatumReader:
    """Checks datums one after another and collects their arrays."""

    def __init__(self, loss: LossSpec, limits: WireLimits) -> None:
        self._loss = loss
        self._limits = limits
        self._cells_left = limits.max_cells
        self._tokens_left = limits.max_tokens
        self._inputs = {_INPUTS[name]: name for name in reads_of(loss) or ("loss_weights",)}
        self._tokens: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self._columns: dict[str, list[np.ndarray]] = {name: [] for name in ("targets", *self._inputs.values())}
        self._layouts: list[Layout] = []
        self._patches: list[int] = []

    def add(self, name: str, datum: Message, pieces: Sequence[Piece], images: ReadImages) -> None:
        joined = self._joined(name, pieces, images)
        tokens = joined.tokens
        tensors = self._read_tensors(name, datum.get("loss_fn_inputs", {}))
        targets = tensors.pop("target_tokens")
        self._check_targets(name, targets, len(tokens))
        for key, tensor in tensors.items():
            if tensor.shape != targets.shape:
                raise BadRequestError(f"{name}.{key} must have the shape {list(targets.shape)} of target_tokens, got {list(tensor.shape)}")
        cells = _cells([targets, *tensors.values()])
        unseen = _before_images(joined)
        if unseen is not None:
            for key in _TRAINING & tensors.keys():
                _check_untrained(f"{name}.{key}", tensors[key], unseen)
        self._tokens.append(tokens)
        self._patches.append(joined.num_patches)
        self._layouts.append(Layout(targets.shape, cells))
        width = targets.shape[-1] if len(targets.shape) == 2 else 1
        self._counts.append(np.full(len(tokens), width) if cells is None else np.bincount(cells // width, minlength=len(tokens)))
        for key, tensor in {"target_tokens": targets, **tensors}.items():
            self._columns[self._inputs.get(key, "targets")].append(tensor.at(cells))
        if "weights" in self._inputs and "weights" not in tensors:
            weights = np.ones(len(self._columns["targets"][-1]), np.float32)
            if unseen is not None:
                weights[np.repeat(unseen, self._counts[-1])] = 0
            self._columns["loss_weights"].append(weights)

    def _joined(self, name: str, pieces: Sequence[Piece], images: ReadImages) -> Joined:
        joined = join(f"{name}.model_input", pieces, images, limits=self._limits)
        self._tokens_left -= len(joined.tokens)
        if self._tokens_left < 0:
            raise TooLargeError(f"data must hold at most {self._limits.max_tokens} tokens; send it in several requests")
        return joined

    def _read_tensors(self, name: str, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        known = ("target_tokens", *self._inputs)
        if unknown := inputs.keys() - set(known):
            raise BadRequestError(f"{name}.loss_fn_inputs: {self._loss.name} takes {', '.join(known)}, got {min(unknown)[:80]!r}")
        # Clients of other servers omit weights to mean weights of 1.
        if missing := [key for key in known if key not in inputs and key != "weights"]:
            raise BadRequestError(f"{name}.loss_fn_inputs: {self._loss.name} needs {', '.join(known)}; {missing[0]} is missing")
        most = min(self._cells_left, self._limits.max_datum_cells)
        tensors = {
            key: read_tensor(tensor, name=f"{name}.{key}", max_cells=most, max_width=self._limits.max_width)
            for key, tensor in inputs.items()}
        if (mask := tensors.get("sequence_ratio_mask")) and np.any((mask.values != 0) & (mask.values != 1)):
            raise BadRequestError(f"{name}.sequence_ratio_mask must hold only 0 and 1")
        return tensors

    def _check_targets(self, name: str, targets: Tensor, num_tokens: int) -> None:
        several = objective_of(self._loss.name).several_targets
        shapes = "[N] or [N, K]" if several else "[N]"
        if targets.shape[0] != num_tokens or (len(targets.shape) == 2 and not several):
            raise BadRequestError(
                f"{name}.target_tokens must have the shape {shapes} for N = {num_tokens} tokens of model_input, got {list(targets.shape)}")
        if targets.values.dtype.kind != "i":
            raise BadRequestError(f"{name}.target_tokens must be int64, got float32")
        self._limits.check_ids(f"{name}.target_tokens", targets.values)
        self._cells_left -= math.prod(targets.shape)

    def batch(self) -> TrainingData:
        """Assemble the batch of all datums added."""
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        targets, num = columns.pop("targets"), len(self._tokens)
        if "advantages" in columns:
            columns["loss_weights"] = columns["advantages"] != 0
        try:
            batch = Batch(
                tokens=np.concatenate(self._tokens), offsets=bounds([len(tokens) for tokens in self._tokens]),
                positions=np.repeat(np.arange(sum(map(len, self._counts))), np.concatenate(self._counts)), targets=targets, columns=columns,
                sequences={"group_ids": np.arange(num), "prefix_lens": np.zeros(num, np.int64)}, losses=(self._loss,))
        except DataError as exc:
            raise BadRequestError(f"data is wrong: {exc}") from exc
        return TrainingData(batch, tuple(self._layouts), tuple(self._patches) if any(self._patches) else ())


def _cells(tensors: Sequence[Tensor]) -> np.ndarray | None:
    """Return the cells to compute, [N] int64: where any tensor is not 0; None for all if the targets, which come first, are dense."""
    first = tensors[0].cells
    if first is None:
        return None
    if all(tensor.cells is not None and np.array_equal(tensor.cells, first) for tensor in tensors[1:]):
        return first  # as clients send them; a union would take most of the time of reading thousands of small datums
    listed = [np.flatnonzero(tensor.values) if tensor.cells is None else tensor.cells for tensor in tensors]
    return np.unique(np.concatenate(listed))


def _before_images(joined: Joined) -> np.ndarray | None:
    """Return at which positions the next token is an image's, [N] bool; None if there is no image."""
    return np.append(joined.of_image[1:], False) if joined.of_image.any() else None


def _check_untrained(name: str, tensor: Tensor, unseen: np.ndarray) -> None:
    """Refuse an input that trains targets which are tokens of an image, since these are given and never sampled."""
    trained = np.flatnonzero(tensor.values)
    cells = trained if tensor.cells is None else tensor.cells[trained]
    positions = cells // (tensor.shape[1] if len(tensor.shape) == 2 else 1)
    if (wrong := unseen[positions]).any():
        raise BadRequestError(
            f"{name} must be 0 where the next token is an image's, as at position {positions[wrong][0]}; only text is trained")
