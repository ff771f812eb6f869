"""What a run prints, where and when.

| when | stdout, through `Progress` | stderr |
|---|---|---|
| before anything starts | | advice on the config, errors (`notices.say`) |
| a span with a `total` begins, goes on, ends; one that is `shown` too | a bar, elsewhere lines | |
| a step of the supervised or preference phase | the loss, beside the bar | |
| a batch has trained | its line and the table of latest numbers (`step_numbers`) | |
| an evaluation has ended | its accuracies (`train.evaluation.Evaluation.summary`) | |
| a rule of `controller.stop` ends the run early | a line | |
| a note to the person who watches | a line | |
| this package or the user's code warns, or any package logs an error | | a line (`log_records`) |
| an attempt ends and the next one begins | | a line of the supervisor (`notices.say`) |
| the run has ended | the final table (`cli.summary`) | |
| the run has failed, stopped or was interrupted | | why, and the next command (`notices.say`) |

The recorder's events reach `display.Display`, which calls `progress.Progress`: bars on a terminal, elsewhere plain
lines. `--quiet` leaves the final table alone on stdout. With `--json-logs` every line is an object: of stdout by
`json_progress.JsonProgress`, of stderr by `say` and `log_records`; `json_stderr` makes objects of what native libraries
print on their own.
"""
