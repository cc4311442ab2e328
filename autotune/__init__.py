"""Config spaces, and the one function through which launchers pick a config."""

from .space import Config, Device, Space, choose, reload, use_config

__all__ = ["Config", "Device", "Space", "choose", "reload", "use_config"]
