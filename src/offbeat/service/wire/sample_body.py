"""JSON body of sampling requests, and its conversion to the service's own terms. Used by `app`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from offbeat.service.errors import BadRequestError, TooLargeError
from offbeat.service.types import SampleRequest, SparseArray
from offbeat.service.wire.chunks import NO_IMAGES, Piece, ReadImages, check_count, image_chunk, join
from offbeat.service.wire.json_body import MAX_SAMPLE_BYTES, Body, Count, Seed, Text, read_json
from offbeat.service.wire.limits import WireLimits
from offbeat.service.wire.schema import INT64
from offbeat.service.wire.tensors import read_tensor

Token = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
TokenOrNone = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
TopTokens = Annotated[int, msgspec.Meta(ge=0, le=256)]

MAX_IMAGE_SAMPLE_BYTES = 64 << 20
"""Limit for bodies with images, which hold a few files of the largest size in base64."""

_MAX_STOP_CHARS = 4096
"""Limit for all stop strings together, for which engines search at every token."""


class Chunk(Body):
    """A piece of a prompt: tokens of a text, or the file of an image in base64."""

    type: str = "encoded_text"
    tokens: list[Token] | None = None
    data: bytes = b""
    format: str = ""
    expected_tokens: Count | None = None
    override_dimensions: dict[str, msgspec.Raw] | None = None


class PromptBody(Body):
    chunks: list[Chunk]


class SamplingBody(Body):
    """Sampling parameters; top_k is -1 for no limit."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    seed: Seed | None = None
    stop: Text | Annotated[list[Text | Token], msgspec.Meta(max_length=64)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = -1
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.stop, list) and len({type(stop) for stop in self.stop}) > 1:
            raise ValueError("stop must hold either strings or token ids, got both")
        if (chars := sum(len(stop) for stop in self.stops or () if isinstance(stop, str))) > _MAX_STOP_CHARS:
            raise ValueError(f"sampling_params.stop must have at most {_MAX_STOP_CHARS} characters in all, got {chars}")

    @property
    def stops(self) -> Any:
        """The stop condition in the form of `SampleRequest.stop`."""
        return (self.stop,) if isinstance(self.stop, str) else None if self.stop is None else tuple(self.stop)


class TensorBody(Body):
    """A tensor of token IDs, dense or in compressed sparse rows; -1 marks no token."""

    data: list[TokenOrNone]
    dtype: str
    shape: list[Count]
    sparse_crow_indices: list[Count] | None = None
    sparse_col_indices: list[Count] | None = None

    def __post_init__(self) -> None:
        if self.dtype != "int64":
            raise ValueError(f"a tensor of token ids must have the dtype int64, got {self.dtype[:40]!r}")

    def message(self) -> Mapping[str, Any]:
        """Convert the tensor to the form of the binary half of the protocol."""
        values, crow, col = (
            np.array(given or (), np.int64).tobytes() for given in (self.data, self.sparse_crow_indices, self.sparse_col_indices))
        if self.sparse_crow_indices is None:
            return {"dense": values, "dtype": INT64, "shape": self.shape}
        return {"sparse_csr": {"values": values, "crow_indices": crow, "col_indices": col}, "dtype": INT64, "shape": self.shape}


class SampleBody(Body):
    max_bytes: ClassVar[int] = MAX_SAMPLE_BYTES

    prompt: PromptBody
    sampling_params: SamplingBody
    sampling_session_id: Text
    seq_id: Count
    num_samples: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: TopTokens = 0
    topk_sample_logprobs: TopTokens = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: TopTokens = 0
    prompt_logprobs_last_n: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def pieces(self, limits: WireLimits) -> tuple[Piece, ...]:
        """Return the prompt's texts and images; raises BadRequestError if a chunk is neither, its image is none, or there are too many."""
        pieces = tuple(_piece(f"prompt.chunks[{index}]", chunk, limits) for index, chunk in enumerate(self.prompt.chunks))
        check_count("prompt", pieces, limits)
        return pieces

    def request(self, limits: WireLimits, pieces: Sequence[Piece], images: ReadImages = NO_IMAGES) -> SampleRequest:
        """Convert the body; `images` are all among the pieces of its prompt.

        Raises BadRequestError if the prompt is empty or too long, or a field does not fit it.
        """
        joined = join("prompt", pieces, images, limits=limits)
        prompt = tuple(joined.tokens.tolist())
        last_n, params = self.prompt_logprobs_last_n, self.sampling_params
        if last_n is not None and (not self.prompt_logprobs or last_n >= len(prompt)):
            raise BadRequestError(
                f"prompt_logprobs_last_n needs prompt_logprobs, and must be 1 to {len(prompt) - 1} for this prompt, got {last_n}")
        return SampleRequest(
            sampling_session_id=self.sampling_session_id, seq_id=self.seq_id, prompt=prompt, num_samples=self.num_samples,
            max_tokens=params.max_tokens, seed=params.seed, stop=params.stops, temperature=params.temperature, top_k=max(params.top_k, 0),
            top_p=params.top_p, prompt_logprobs=bool(self.prompt_logprobs), topk_prompt_logprobs=self.topk_prompt_logprobs,
            topk_sample_logprobs=self.topk_sample_logprobs, target_prompt_logprobs=self._targets(len(prompt), limits),
            prompt_alt_tokens_k=self.prompt_alt_tokens_k, prompt_logprobs_last_n=last_n, num_patches=joined.num_patches)

    def _targets(self, length: int, limits: WireLimits) -> SparseArray | None:
        """Return [length, K] int64. The request's rows start at the second position, because the first cannot be scored."""
        tensor, name = self.target_prompt_logprobs, "target_prompt_logprobs"
        if tensor is None:
            return None
        read = read_tensor(tensor.message(), name=name, max_cells=limits.max_datum_cells, max_width=limits.max_width)
        if len(read.shape) != 2 or read.shape[0] != length - 1:
            raise BadRequestError(f"{name} must have the shape [{length - 1}, K] for a prompt of {length} tokens, got {list(read.shape)}")
        limits.check_ids(name, read.values[read.values != -1])
        width, wanted = read.shape[1], np.flatnonzero(read.values != -1)
        return SparseArray(read.values[wanted], (wanted if read.cells is None else read.cells[wanted]) + width, (length, width))


def _piece(name: str, chunk: Chunk, limits: WireLimits) -> Piece:
    if chunk.type == "image":
        resized = chunk.override_dimensions is not None
        return image_chunk(name, chunk.data, chunk.format, chunk.expected_tokens, limits=limits, resized=resized)
    if chunk.type == "image_asset_pointer":
        raise BadRequestError(f"{name} points to an image, and nothing is fetched; send its bytes as an image chunk")
    if chunk.type != "encoded_text" or chunk.tokens is None:
        raise BadRequestError(
            f"{name} is {chunk.type[:80]!r}; this server takes encoded_text, with tokens, and image for a model that reads images")
    return np.array(chunk.tokens, np.int64)


class SampleWithImages(SampleBody):
    """Body of POST asample for a model that reads images, whose files may make it larger."""

    max_bytes: ClassVar[int] = MAX_IMAGE_SAMPLE_BYTES


def read_sample(data: bytes, *, takes_images: bool) -> SampleBody:
    """Parse a body; raises as `read_json`. Whatever its images are, it has no more values than one of text may have.

    Args:
        takes_images: whether the server's model reads images.
    """
    if not takes_images:
        return read_json(SampleBody, data)
    check_values(data)
    return read_json(SampleWithImages, data)


def check_values(data: bytes) -> None:
    """Raise TooLargeError if a body that images made large has more values than one of text may have."""
    if len(data) > MAX_SAMPLE_BYTES and data.count(b",") > MAX_SAMPLE_BYTES // 2:
        raise TooLargeError(f"the body may have at most {MAX_SAMPLE_BYTES} bytes beside its images; send less at once")
