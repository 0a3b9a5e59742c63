"""Options of encoders that are loaded from a checkpoint."""

import pytest
import tiny

from ssvit.errors import OptionError
from ssvit.loading.encoder import load_layers
from ssvit.loading.options import LoadLayers


def test_the_last_layer_must_be_one_of_the_checkpoint(tmp_path):
    tiny.train(tmp_path / "run", steps=4)
    encoder = load_layers(LoadLayers(checkpoint=tmp_path / "run", layer=1))
    assert len(encoder.blocks) == 1
    with pytest.raises(OptionError, match="layer=3"):
        LoadLayers(checkpoint=tmp_path / "run", layer=3)
