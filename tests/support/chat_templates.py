"""Chat templates like those of public checkpoints, and conversations to render with them."""

# Like Qwen's: a default system message, whitespace control, an optional header of the answer.
CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou answer briefly.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Like Llama 3's: begins with bos_token, separates the system message, writes the date, supports tools.
LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Tools: " + tools|tojson(indent=4) }}
{%- endif %}
{{- "Today is " + date_string + ".\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Like Mistral's: a namespace, alternating roles, lines that trim_blocks and lstrip_blocks must clean up.
MISTRAL = """\
{% if messages[0]["role"] == "system" %}
    {% set system_message = messages[0]["content"] %}
    {% set loop_messages = messages[1:] %}
{% else %}
    {% set loop_messages = messages %}
{% endif %}
{% set ns = namespace(num_turns=0) %}
{{- bos_token }}
{% for message in loop_messages %}
    {% if (message["role"] == "user") != (ns.num_turns % 2 == 0) %}
        {{- raise_exception("after the optional system message, user and assistant must take turns") }}
    {% endif %}
    {% set ns.num_turns = ns.num_turns + 1 %}
    {% if message["role"] == "user" %}
        {% if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {% else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {% endif %}
    {% else %}
        {{- " " + message["content"]|trim + eos_token}}
    {% endif %}
{% endfor %}
"""

# Further features: generation tags, loop controls, JSON, macros, blocks of whitespace.
ODD = """\
{% macro turn(message) %}[{{ message.role|upper }}] {{ message | tojson }}{% endmacro %}
{% for message in messages %}
    {% if message.role == 'developer' %}
        {% continue %}
    {% endif %}
    {% if message.role == 'assistant' %}
        {% generation %}
{{ turn(message) }}
        {% endgeneration %}
    {% else %}
{{ turn(message) }}
    {% endif %}
{% endfor %}
{{ dict(a=1, b='<&>') | tojson }}{{ unk_token is defined }}
{% if add_generation_prompt %}[ASSISTANT]{% endif %}
"""

TEMPLATES = {"chatml": CHATML, "llama_3": LLAMA_3, "mistral": MISTRAL, "odd": ODD}

USER = [{"role": "user", "content": "  Größe?\n"}]
CONVERSATIONS = {
    "one": USER,
    "system": [{"role": "system", "content": " Be <brief> & 'kind'. "}, *USER],
    "turns": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "def f(x):\n    {{ x }}"},
        {"role": "assistant", "content": "\nreturn 🙂\n"},
        {"role": "user", "content": ""},
    ],
}

# Like those of Hermes and Qwen with tools: functions as JSON, calls between tags, results as user messages.
HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\nYou may call these functions:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- 'Call one by <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
