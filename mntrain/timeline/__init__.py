"""One trace of all ranks on one clock, in the Trace Event Format that Perfetto reads."""

from mntrain.timeline.trace import StepTimeline, Timeline

__all__ = ["StepTimeline", "Timeline"]
