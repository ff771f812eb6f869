"""An agent for tasks in Harbor's format, standard library only: asks once, and writes the reply to answer.txt."""

import json
import os
import sys
import urllib.request
from pathlib import Path

message = {"role": "user", "content": f"{sys.argv[-1]} {Path('word.txt').read_text()}"}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [message]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
answer = json.load(urllib.request.urlopen(request))
Path("answer.txt").write_text(answer["choices"][0]["message"]["content"])
