"""An image reader whose processor runs in the test's process, where transformers is loaded already."""

from pathlib import Path

from offbeat.data import wire
from offbeat.data.image_process import Processor
from offbeat.data.image_reader import ImageReader
from offbeat.data.image_sources import ImageLimits
from offbeat.data.image_store import ImageStore


class ReaderInProcess(ImageReader):
    """Makes images here, and counts them."""

    num_made = 0

    def _ask(self, data: bytes) -> bytes:
        self.num_made += 1
        processor = Processor(self._model, model_type=self._model_type, image_token_id=self._placeholder)
        return wire.encode(processor.make(data, self.limits))


def reader_in_process(model: Path, store: Path) -> ReaderInProcess:
    """Return a reader of a model's images, of at most 4 in a row."""
    return ReaderInProcess(str(model), ImageStore(store), ImageLimits(max_images=4))
