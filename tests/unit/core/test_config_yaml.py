"""Configurations as YAML keep the types of their values."""

from __future__ import annotations

import pytest
import yaml
from jsonargparse import ArgumentParser

from lit_dps.core.config_yaml import ConfigDumper, ConfigLoader


@pytest.mark.parametrize("value", ["1e5", "1e-3", "-2E+4", "2024-01-01", 1e-05, 1e16, True, None])
def test_a_value_that_is_written_is_read_with_its_type(value):
    """Also by the parser of the commands, for which 1e5 without quotes is a number."""
    text = yaml.dump({"value": value}, Dumper=ConfigDumper)
    assert yaml.load(text, Loader=ConfigLoader) == {"value": value}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=str | float | bool | None)
    assert repr(parser.parse_string(text).value) == repr(value)
