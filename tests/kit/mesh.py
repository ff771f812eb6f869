"""The ranks of a role, of which there are none."""


class Mesh:
    """Notes every operation in `log`, as (role, operation, arguments ...) with the items of a list one by one, and
    gives `answers[operation]`: an exception is raised, None is the answer where there is none."""

    def __init__(self, role="policy", log=None, *, data_parallel_size=1, **answers):
        self.role, self.data_parallel_size, self.answers = role, data_parallel_size, answers
        self.log = [] if log is None else log

    async def call_all(self, operation, *arguments):
        name = operation.__name__
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        items = [item for each in arguments for item in (each if isinstance(each, list) else [each])]
        self.log.append((self.role, name, *items))
        return answer

    call_each = call_leader = call_all
