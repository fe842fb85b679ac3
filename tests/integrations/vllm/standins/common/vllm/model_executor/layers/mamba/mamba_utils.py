dim_first = False


def is_conv_state_dim_first() -> bool:
    return dim_first
