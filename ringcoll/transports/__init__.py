"""Transports between GPUs of one host: CUDA IPC, virtual memory, or pinned host memory."""
