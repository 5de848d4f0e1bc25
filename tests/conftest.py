import os
from pathlib import Path

# Compiled programs are kept between runs of the suite: compiling is most of its time.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

