import os
import signal
from pathlib import Path

# A shell has what it starts with & ignore interrupts, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Compiled programs are kept between runs of the suite: compiling is most of its time.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_terminal_summary(terminalreporter):
    """What was not run against a real vLLM is said last, by name and reason."""
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if "real_vllm" in report.nodeid]
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.write_line(f"NOT RUN against a real vLLM: {report.nodeid}: {reason}", red=True, bold=True)
