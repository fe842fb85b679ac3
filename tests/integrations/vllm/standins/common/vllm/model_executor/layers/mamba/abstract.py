class MambaBase:
    kv_cache: tuple
