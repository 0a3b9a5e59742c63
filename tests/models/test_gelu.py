"""GELU by tanh: which files have it."""

import json

import peers
import pytest
from safetensors.torch import save_file

from ssvit.errors import UserError
from ssvit.exchange import reading
from ssvit.loading.finding import open_checkpoint


def test_it_is_said_of_the_authors_files_alone(tmp_path):
    google, plain = peers.google(tmp_path), peers.timm_plain(tmp_path)
    assert "gelu tanh" in reading.read_foreign(google.path, google.told).notes
    assert "gelu exact" in reading.read_foreign(plain.path, plain.told).notes
    assert open_checkpoint(plain.path, plain.told).encoder["gelu"] == "exact"


def test_the_gelu_of_hugging_face_is_that_of_its_configuration(tmp_path):
    peer = peers.huggingface(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name, gelu in (("gelu", "exact"), ("gelu_new", "tanh"), ("gelu_pytorch_tanh", "tanh")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": name}))
        assert open_checkpoint(peer.path).encoder["gelu"] == gelu


def test_timms_other_activations_are_refused(tmp_path):
    save_file(peers.of_timm().state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_args": {"act_layer": "quick_gelu"}}))
    with pytest.raises(UserError, match="act_layer='quick_gelu': "):
        reading.read_foreign(tmp_path / "model.safetensors", peers.TOLD)
