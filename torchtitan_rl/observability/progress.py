from contextlib import contextmanager
class Progress:
    def __init__(s,quiet=False): pass
    @contextmanager
    def phase(s,n,total):
        class B:
            def advance(self,text=""): pass
        yield B()
    @contextmanager
    def spinner(s,n,expected_s=None): yield
    def line(s,t): print(t,flush=True)
    def final_table(s,rows):
        for r in rows: print(r)
