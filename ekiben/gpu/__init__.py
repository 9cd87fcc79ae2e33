"""GPUs: device_code (which GPUs a library has code for), devices (the GPUs of this machine), elf (a library's symbols)."""

__all__ = ["device_code", "devices", "elf"]
