"""A listener of a run that keeps all it hears."""

from torchtitan_rl.record.recorder import Listener


class Heard(Listener):
    """`heard` has the name of each call first, then what was said."""

    def __init__(self):
        self.heard = []

    def metrics(self, event):
        self.heard.append(("metrics", event))

    def begin(self, span):
        self.heard.append(("begin", span.name))

    def advance(self, span, pieces, text):
        self.heard.append(("advance", span.name, pieces, text))

    def end(self, span, failed):
        self.heard.append(("end", span.name, failed))

    def beat(self):
        self.heard.append(("beat",))
