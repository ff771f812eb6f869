#!/bin/bash
tail -c 1 word.txt > answer.txt
