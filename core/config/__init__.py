"""Settings from keywords, environment, file and defaults, in that order of precedence, with the origin of every value.

A file is read from `config=` or `$TLLM_CONFIG`; only the command line also looks for `./tllm.toml`. Nothing is read when
this module is imported.
"""

from tllm_core.config.convert import convert_options
from tllm_core.config.load import load_settings
from tllm_core.config.settings import (
    AttachSettings,
    Choice,
    EngineChoice,
    LedgerSettings,
    PluginSettings,
    Settings,
)
from tllm_core.config.shown import Shown, masked, shown_settings, unused_tables
from tllm_core.config.sources import Text

__all__ = [
    "AttachSettings",
    "Choice",
    "EngineChoice",
    "LedgerSettings",
    "PluginSettings",
    "Settings",
    "Shown",
    "Text",
    "convert_options",
    "load_settings",
    "masked",
    "shown_settings",
    "unused_tables",
]
