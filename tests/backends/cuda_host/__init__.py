"""Runs rendered CUDA kernels on the CPU, thread by thread, so that their logic is tested where there is no GPU."""
