"""Trainer and sampler in the test's own process, behind the same interface as cluster.Group: no Ray, so a test can
reach inside."""


class Local:
    def __init__(self, *members):
        self.actors = members

    def __len__(self):
        return len(self.actors)

    def __getattr__(self, verb):
        if verb.startswith("_"):
            raise AttributeError(verb)
        return lambda *args, **kw: [getattr(m, verb)(*args, **kw) for m in self.actors]

    def each(self, verb, arguments):
        return [getattr(m, verb)(*args) for m, args in zip(self.actors, arguments)]
