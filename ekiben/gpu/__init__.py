"""GPUs: container_gpus (how containers get them), device_code (which GPUs a library has code for), devices (the GPUs of
this machine), elf (a library's symbols)."""

__all__ = ["container_gpus", "device_code", "devices", "elf"]
