LINEAR_ATTN_KERNEL_BACKEND_CHOICES = ["triton", "flashkda"]

add_linear_attn_kernel_backend_choices = LINEAR_ATTN_KERNEL_BACKEND_CHOICES.extend
