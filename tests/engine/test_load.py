import pytest

import jaxspec


def test_more_devices_than_there_are_are_refused(tiny_engines):
    with pytest.raises(jaxspec.ConfigError, match=r"engine\.tensor_parallel is 99, but jax sees"):
        jaxspec.load(tiny_engines.folders["target"], tensor_parallel=99, progress=False)


@pytest.mark.parametrize("model", ["x" * 5000, "~nobody-of-this-name/model", "a\0b"])
def test_a_name_that_can_be_no_path_is_refused_in_one_line(model):
    with pytest.raises((jaxspec.ConfigError, jaxspec.CheckpointError)):
        jaxspec.load(model)
