"""Every family of docs/models.md does what its row says; what a cell means is in `families.py`."""

import pytest

import image_world
from families import DOCUMENT, document, try_all
from family_table import FAMILIES
from offbeat.model.images import IMAGE_FAMILIES

CELLS, IMAGES = {}, {}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_works_is_right_and_what_does_not_is_refused(family):
    CELLS[family.name] = try_all(family)


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_images_are_read_as_transformers_reads_them(family):
    IMAGES[family] = image_world.try_all(family)


def test_the_document_is_what_the_code_makes():
    if len(CELLS) < len(FAMILIES) or len(IMAGES) < len(IMAGE_FAMILIES):
        pytest.skip("takes the results of all families, which did not run in this session")
    assert DOCUMENT.read_text(encoding="utf-8") == document(CELLS, IMAGES), "run python tests/model/families.py --write"
