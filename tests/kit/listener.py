"""A listener of a run that keeps all it hears."""

from torchtitan_rl.record.recorder import Listener


class EventLog(Listener):
    """`events` has the name of each call first, then what was said."""

    def __init__(self):
        self.events = []

    def metrics(self, event):
        self.events.append(("metrics", event))

    def begin(self, span):
        self.events.append(("begin", span.name))

    def advance(self, span, pieces, text):
        self.events.append(("advance", span.name, pieces, text))

    def end(self, span, failed):
        self.events.append(("end", span.name, failed))

    def beat(self):
        self.events.append(("beat",))
