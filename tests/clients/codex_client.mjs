// Run in the clients' npm folder: Codex, which speaks Responses alone.
import { writeFileSync } from "node:fs";
import { ANSWER, ASK, ASK_AND_THINK, HERE, HOME, MODEL, SCHEMA, URL, WEATHER, events, run, same } from "./report.mjs";

const provider = `{name="here", base_url="${URL}/v1", wire_api="responses"}`;
const settings = ["model_provider=here", `model_providers.here=${provider}`, "web_search=disabled"];

function turn(prompt, ...more) {
  const options = settings.flatMap((setting) => ["-c", setting]);
  const asked = ["exec", "--skip-git-repo-check", "--json", "-m", MODEL, ...options, ...more, prompt];
  const found = events(`${HERE}/node_modules/.bin/codex`, asked, { CODEX_HOME: HOME });
  const items = found.filter((event) => event.type === "item.completed").map((event) => event.item);
  same(found.at(-1).type, "turn.completed");
  return items.filter((item) => item.type !== "error");
}

function responses() {
  same(turn(ASK_AND_THINK).at(-1).text, ANSWER);
}

function tools() {
  const [command, message] = turn('call exec_command {"cmd": "echo Bonn"}');
  same([command.aggregated_output, command.exit_code, message.text], ["Bonn\n", 0, ANSWER]);
}

function schema() {
  const file = `${HOME}/schema.json`;
  writeFileSync(file, JSON.stringify(SCHEMA));
  same(JSON.parse(turn(ASK, "--output-schema", file).at(-1).text), WEATHER);
}

await run({ responses, tools, schema });
