"""Host side of the kernels: planning, arguments, launches. One file a kernel, named like its source in csrc/."""
