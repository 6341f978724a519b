"""The jinja2 environment of the kernel templates."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from attngen.resources import resource_folder


@cache
def environment(backend: str) -> Environment:
    """Templates of one backend: undefined names are errors, block tags leave no blank lines."""
    return Environment(
        loader=FileSystemLoader(resource_folder("templates") / backend),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
