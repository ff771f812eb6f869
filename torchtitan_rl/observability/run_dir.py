import json, dataclasses
from pathlib import Path
class RunDir:
    def __init__(s,p): s.path=Path(p)
    @classmethod
    def create(c,p):
        r=c(p); r.path.mkdir(parents=True,exist_ok=True); (r.path/"logs").mkdir(exist_ok=True); return r
    def write_config(s,d): (s.path/"config.json").write_text(json.dumps(d,indent=1))
    def log_metrics(s,d):
        with open(s.path/"metrics.jsonl","a") as f: f.write(json.dumps(d)+"\n")
    def log_rollouts(s,*a): pass
    def checkpoint_path(s,n): return s.path/"checkpoints"/f"step-{n}"
    def read_metrics(s): return [json.loads(l) for l in open(s.path/"metrics.jsonl")]
