"""Configuration: models of every setting, YAML files with overrides, and names of models."""

from libra.config.load import RunConfig, config_from_dict, dump_config, load_config, typed_settings
from libra.config.model_paths import resolve_model

__all__ = ["RunConfig", "config_from_dict", "dump_config", "load_config", "resolve_model", "typed_settings"]
