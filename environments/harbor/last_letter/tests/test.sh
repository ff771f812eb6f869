#!/bin/bash
# Paths are relative to the working directory or come from variables, so the script runs inside and outside of a container.
logs=${HARBOR_LOGS:-/logs}
word=$(cat word.txt)
if [ "$(cat answer.txt 2>/dev/null)" = "${word: -1}" ]; then echo 1; else echo 0; fi > "$logs/verifier/reward.txt"
