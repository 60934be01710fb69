// Run in the clients' npm folder: Claude Code, which speaks Messages alone.
import { ANSWER, ASK, ASK_AND_THINK, HERE, HOME, MODEL, SCHEMA, THINKING, URL, WEATHER, events, run, same } from "./report.mjs";

const environment = {
  ANTHROPIC_BASE_URL: URL,
  ANTHROPIC_AUTH_TOKEN: "none",
  ANTHROPIC_MODEL: MODEL,
  CLAUDE_CONFIG_DIR: `${HOME}/claude`,
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
};
// `claude` itself is put in its place by a script of the package, which has not run
const wrapper = `${HERE}/node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs`;

function turn(prompt, ...more) {
  const asked = [wrapper, "-p", prompt, "--output-format", "stream-json", "--verbose", ...more];
  const found = events("node", asked, environment);
  const { is_error, result, structured_output } = found.find((event) => event.type === "result");
  same(is_error, false);
  const turns = found.filter((event) => event.type === "assistant" || event.type === "user");
  const blocks = turns.flatMap((event) => event.message.content);
  return { found, blocks, result, structured_output };
}

function messages() {
  const { blocks, result } = turn(ASK_AND_THINK);
  same(result, ANSWER);
  same(blocks.find((block) => block.type === "thinking").thinking, THINKING);
}

function stream() {
  const { found } = turn(ASK, "--include-partial-messages");
  const partial = found.filter((event) => event.type === "stream_event").map((each) => each.event);
  const texts = partial.map((event) => event.delta?.text).filter(Boolean);
  same([texts.join(""), texts.length > 3], [ANSWER, true]);
}

function tools() {
  const bash = 'call Bash {"command": "echo Bonn", "description": "Say it"}';
  const { blocks, result } = turn(bash, "--allowedTools", "Bash");
  const results = blocks.filter((block) => block.type === "tool_result");
  same([result, ...results.map((block) => block.content)], [ANSWER, "Bonn"]);
  // the tool that it finds this way is among those of its next request
  const search = turn('call ToolSearch {"query": "select:WebFetch"}');
  const reference = { type: "tool_reference", tool_name: "WebFetch" };
  same(search.blocks.find((block) => block.type === "tool_result").content, [reference]);
}

function schema() {
  const call = `call StructuredOutput ${JSON.stringify(WEATHER)}`;
  same(turn(call, "--json-schema", JSON.stringify(SCHEMA)).structured_output, WEATHER);
}

await run({ messages, stream, tools, schema });
