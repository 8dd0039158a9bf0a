"""Reads the images of requests into tokens, by the model's own processor, and keeps them for trainers and engines. Used by the routes.

One thread reads, each owner's images one after the other, so that a slow image of one owner delays others by one image at most. What an
image becomes is stored by its hash: one that comes again is neither decoded nor stored anew.

An owner's images of the last hour have a share of the disk, since they cannot be removed meanwhile.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from offbeat.data.image_reader import ImageReader
from offbeat.data.image_sources import ImageSource
from offbeat.data.image_store import StoredImage
from offbeat.errors import BusyError, DataError, ModelError
from offbeat.service.app.readers import Readers
from offbeat.service.errors import BadRequestError, OverLimitError, RequestError, outside
from offbeat.service.wire.chunks import ImageChunk, ReadImage, ReadImages
from offbeat.telemetry.log import current_request

MOST_STORED_BYTES = 8 << 30
"""Bytes of processed images that are kept; beyond that, those that were not used for an hour are removed."""
_SHARE_OF_ONE = 4
_HOUR_S = 3600.0
_MOST_KNOWN = 4096
"""Images that are found without reading their files."""
_FULL = "your images of the last hour take up {used} bytes, as many as you may have at a time; send the request again later"


@dataclass(frozen=True, eq=False)
class _StoredOnce:
    """An image that was read: its id, what a request needs of it, and the bytes of its arrays."""

    id: int
    read: ReadImage
    num_bytes: int


@dataclass(eq=False)
class _Share:
    """What an owner's images of the last hour take: when each was first asked for, and its bytes, by id, the oldest first."""

    used: OrderedDict[int, tuple[float, int]] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def forget(self, now: float) -> None:
        while self.used and (first := next(iter(self.used.values())))[0] < now - _HOUR_S:
            self.used.popitem(last=False)
            self.num_bytes -= first[1]

    def add(self, image: _StoredOnce, now: float) -> None:
        if image.id not in self.used:
            self.used[image.id] = now, image.num_bytes
            self.num_bytes += image.num_bytes


class RequestImages:
    """The images of requests for one model."""

    def __init__(self, reader: ImageReader | None, *, most_bytes: int = MOST_STORED_BYTES) -> None:
        """`reader` is None for a model that reads none, whose requests then have none; `most_bytes` is the bound of its store."""
        self._reader = reader
        self._thread = Readers(num_threads=1)
        self._known: OrderedDict[bytes, _StoredOnce] = OrderedDict()
        self._most_of_one = most_bytes // _SHARE_OF_ONE
        self._shares: dict[str, _Share] = {}

    async def read(self, owner: str, chunks: Sequence[ImageChunk]) -> ReadImages:
        """Return what each image becomes.

        Raises:
            BadRequestError: one cannot be used, or has another number of tokens than its client expects.
            RequestError: the model's processor cannot be opened.
            OverLimitError: the owner's images, or all, fill what may be stored for now.
        """
        found = {}
        for chunk in chunks:
            try:
                found[chunk] = await self._thread.run(owner, self._read_one, owner, chunk)
            except DataError as exc:
                raise BadRequestError(outside(str(exc), name=current_request.get())) from exc
            except BusyError as exc:
                raise OverLimitError(str(exc), retry_after_s=5.0) from exc
            except ModelError as exc:
                raise RequestError(outside(str(exc), name=current_request.get())) from exc
            expected, length = chunk.expected_tokens, len(found[chunk].tokens)
            if expected is not None and expected != length:
                raise BadRequestError(
                    f"{chunk.name} has {length} tokens by the model's own processor, and its expected_tokens are {expected}; count as the"
                    " processor does, or leave expected_tokens out")
        return found

    def _read_one(self, owner: str, chunk: ImageChunk) -> ReadImage:
        assert self._reader is not None, "a request with images is refused otherwise"
        now = time.monotonic()
        share = self._share_of(owner, now)
        key = hashlib.sha256(chunk.data).digest()
        known = self._known.get(key)
        if known is None or not self._reader.store.is_stored(known.id):
            if share.num_bytes >= self._most_of_one:
                raise OverLimitError(_FULL.format(used=share.num_bytes), retry_after_s=60.0)
            known = self._keep(key, self._reader.read(ImageSource(data=bytes(chunk.data)), chunk.name))
        self._known.move_to_end(key)
        share.add(known, now)
        return known.read

    def _share_of(self, owner: str, now: float) -> _Share:
        if owner not in self._shares:
            for each in self._shares.values():
                each.forget(now)
            self._shares = {name: each for name, each in self._shares.items() if each.used} | {owner: _Share()}
        self._shares[owner].forget(now)
        return self._shares[owner]

    def _keep(self, key: bytes, image: StoredImage) -> _StoredOnce:
        assert self._reader is not None, "an image was read"
        read = ReadImage(image.tokens, self._reader.num_patches(image))
        known = _StoredOnce(image.id, read, sum(array.nbytes for array in image.arrays.values()))
        self._known.pop(key, None)
        while len(self._known) >= _MOST_KNOWN:
            self._known.popitem(last=False)
        self._known[key] = known
        return known
