"""Configurations as YAML, with the numbers of jsonargparse."""

from __future__ import annotations

import re

import yaml

FLOAT_TAG = "tag:yaml.org,2002:float"


class ConfigLoader(yaml.SafeLoader):
    """PyYAML's loader with the numbers of jsonargparse: 1e-3 is a number, and a date is text.

    Otherwise a value that this package reads and sends to the parser would change its type.
    """


_JSONARGPARSE_FLOAT = re.compile(
    r"""^(?:
    [-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
    |\.[0-9_]+(?:[eE][-+][0-9]+)?
    |[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN)
    )$""",
    re.VERBOSE,
)
_OTHER_TAGS = (FLOAT_TAG, "tag:yaml.org,2002:timestamp")
ConfigLoader.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] not in _OTHER_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
ConfigLoader.add_implicit_resolver(FLOAT_TAG, _JSONARGPARSE_FLOAT, list("-+0123456789."))


class ConfigDumper(yaml.SafeDumper):
    """PyYAML's dumper for `ConfigLoader` and jsonargparse: it quotes the text '1e-3'."""

    yaml_implicit_resolvers = ConfigLoader.yaml_implicit_resolvers
